"""A training step that is compiled separately for each batch shape, ahead of time if possible."""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import jax

from transformer_jax.backend import standard_settings
from transformer_jax.data.batches import Batch, Bucket
from transformer_jax.training.sharding import DataParallel
from transformer_jax.training.step import StepMetrics, TrainState, TrainStep

Shape = tuple[int, ...]
"""The number of runs (only if a step trains several), rows, source length, and target length."""
# On a GPU, this many shapes are compiled at the same time. XLA uses several cores for each shape.
MAX_CONCURRENT = 4


class CompiledStep:
    """A sharded training step, compiled ahead of time for each batch shape.

    On exit, each compilation thread finishes only its current compilation.
    """

    def __init__(
        self, step: TrainStep, sharding: DataParallel, num_runs: int | None = None
    ) -> None:
        """Store the arguments; `num_runs` is the number of runs in a step for several runs."""
        self._step, self._sharding = step, sharding
        self._numbers = sharding.place_state(step.make_numbers())
        self._runs = () if num_runs is None else (num_runs,)
        self._compiled: dict[Shape, jax.stages.Compiled] = {}
        self._is_gpu = sharding.platform == "gpu"
        self._thread = ThreadPoolExecutor(MAX_CONCURRENT if self._is_gpu else 1, "compile")
        self._ahead: dict[Shape, Future[str]] = {}

    def __enter__(self) -> "CompiledStep":
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown(cancel_futures=True)

    def is_compiled_for(self, batch: Batch) -> bool:
        """Return whether the step is compiled for the shape of this batch."""
        return _shape(batch) in self._compiled

    def compile(self, state: TrainState, batch: Batch, upcoming: Sequence[Bucket] = ()) -> str:
        """Compile the step for this process's rows in a batch, and return a message about it.

        Also compile the upcoming buckets: in the background or, on a GPU, before returning, because
        training would distort the timings by which XLA selects kernels.
        """
        if self._is_gpu:
            self.compile_ahead(state, upcoming)
            wait(self._ahead.values())
        if (future := self._ahead.pop(_shape(batch), None)) is not None:
            return future.result()
        message = self._compile(_shape(batch), state, self._sharding.place_batch(batch))
        self.compile_ahead(state, upcoming)
        return message

    def compile_ahead(self, state: TrainState, buckets: Sequence[Bucket]) -> None:
        """Compile upcoming buckets in the background, unless processes have to compile in order."""
        if jax.process_count() > 1:
            return
        abstract_state = self._sharding.abstract_state(state)
        for bucket in buckets:
            one = self._sharding.abstract_batch(bucket)
            rows = one.source.size // bucket.source
            batch = Batch(*(x.update(shape=(*self._runs, *x.shape)) for x in one))
            shape = (*self._runs, rows, bucket.source, bucket.target)
            if shape not in self._compiled and shape not in self._ahead:
                self._ahead[shape] = self._thread.submit(
                    self._compile, shape, abstract_state, batch, is_ahead=not self._is_gpu
                )

    def is_compiling_ahead(self) -> bool:
        """Return whether `compile_ahead` is still compiling. If so, the threads cannot exit."""
        return any(not future.done() for future in self._ahead.values())

    def take_finished(self) -> Iterator[str]:
        """Yield messages about background compilations that have finished since the last call."""
        for shape, future in list(self._ahead.items()):
            # If a compilation failed, its error is raised when a batch needs the compiled program.
            if future.done() and future.exception() is None:
                yield self._ahead.pop(shape).result()

    @standard_settings()
    def _compile(
        self, shape: Shape, state: TrainState, placed: Batch, *, is_ahead: bool = False
    ) -> str:
        start = time.perf_counter()
        self._compiled[shape] = self._sharding.compile(self._step, state, placed)
        seconds = time.perf_counter() - start
        *runs, _, source_length, target_length = shape
        rows = placed.source.size // source_length
        size = f"{rows} x ({source_length} + {target_length})"
        if runs:
            size = f"{runs[0]} runs x {rows // runs[0]} x ({source_length} + {target_length})"
        meanwhile = " while training" if is_ahead else ""
        return f"compiled for {size} tokens in {seconds:.1f} s{meanwhile}"

    def __call__(
        self, state: TrainState, batch: Batch, placed: Batch | None = None
    ) -> tuple[TrainState, StepMetrics]:
        """Run one step on this process's rows; `placed` is the result of `place_batch`."""
        if not self.is_compiled_for(batch):
            self.compile(state, batch)
        placed = self._sharding.place_batch(batch) if placed is None else placed
        return self._compiled[_shape(batch)](state, self._numbers, placed)


def _shape(batch: Batch) -> Shape:
    return (*batch.source.shape, batch.target.shape[-1])
