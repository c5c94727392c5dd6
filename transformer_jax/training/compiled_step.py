"""A training step that is compiled separately for each batch shape, ahead of time if possible."""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import jax

from transformer_jax.data.batches import Batch, Bucket
from transformer_jax.training.sharding import DataParallel
from transformer_jax.training.step import StepMetrics, TrainState, TrainStep

Shape = tuple[int, int, int]
"""The shape of this process's rows of a batch: number of rows, source length, and target length."""


class CompiledStep:
    """A sharded training step, compiled ahead of time for each batch shape.

    On exit, this context manager stops its compilation thread. An XLA compilation cannot be
    interrupted, so the thread first finishes the current compilation.
    """

    def __init__(self, step: TrainStep, sharding: DataParallel) -> None:
        self._step, self._sharding = step, sharding
        self._numbers = sharding.place_state(step.make_numbers())
        self._compiled: dict[Shape, jax.stages.Compiled] = {}
        self._thread = ThreadPoolExecutor(1, "compile")
        self._ahead: dict[Shape, Future[str]] = {}

    def __enter__(self) -> "CompiledStep":
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown(cancel_futures=True)

    def is_compiled_for(self, batch: Batch) -> bool:
        """Return whether the step is compiled for the shape of this batch."""
        return _shape(batch) in self._compiled

    def compile(self, state: TrainState, batch: Batch) -> str:
        """Compile the step for this process's rows of a batch, without running it.

        If `compile_ahead` has already scheduled this shape, wait for that compilation. Return a
        message that states the padded shape of the global batch and the compilation time.
        """
        if (future := self._ahead.pop(_shape(batch), None)) is not None:
            return future.result()
        return self._compile(_shape(batch), state, self._sharding.place_batch(batch))

    def compile_ahead(self, state: TrainState, buckets: Sequence[Bucket]) -> None:
        """Compile the step for upcoming buckets in a background thread, one bucket at a time.

        The compiled programs are identical to those from `compile`. With multiple processes, this
        method does nothing, because the processes must compile the shapes in the order in which
        they train on them. The method also does nothing on GPUs, because XLA selects kernels by
        timing them on the device, and concurrent training would distort the measurements.
        """
        if jax.process_count() > 1 or self._sharding.platform == "gpu":
            return
        abstract_state = self._sharding.abstract_state(state)
        for bucket in buckets:
            batch = self._sharding.abstract_batch(bucket)
            rows = batch.source.size // bucket.source
            shape = (rows, bucket.source, bucket.target)
            if shape not in self._compiled and shape not in self._ahead:
                self._ahead[shape] = self._thread.submit(
                    self._compile, shape, abstract_state, batch, is_ahead=True
                )

    def is_compiling_ahead(self) -> bool:
        """Return whether `compile_ahead` is still compiling. If so, its thread cannot exit yet."""
        return any(not future.done() for future in self._ahead.values())

    def take_finished(self) -> Iterator[str]:
        """Yield messages about background compilations that have finished since the last call."""
        for shape, future in list(self._ahead.items()):
            # If a compilation failed, its error is raised when a batch needs the compiled program.
            if future.done() and future.exception() is None:
                yield self._ahead.pop(shape).result()

    def _compile(
        self, shape: Shape, state: TrainState, placed: Batch, *, is_ahead: bool = False
    ) -> str:
        start = time.perf_counter()
        self._compiled[shape] = self._sharding.compile(self._step, state, placed)
        seconds = time.perf_counter() - start
        _, source_length, target_length = shape
        size = f"{placed.source.size // source_length} x ({source_length} + {target_length})"
        meanwhile = " while training" if is_ahead else ""
        return f"compiled for {size} tokens in {seconds:.1f} s{meanwhile}"

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
        """Run one step on this process's rows, compiling it if necessary. The state is donated."""
        if not self.is_compiled_for(batch):
            self.compile(state, batch)
        placed = self._sharding.place_batch(batch)
        return self._compiled[_shape(batch)](state, self._numbers, placed)


def _shape(batch: Batch) -> Shape:
    return (*batch.source.shape, batch.target.shape[1])
