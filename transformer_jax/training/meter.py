"""Sums and rates between two reports."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

import jax

from transformer_jax.data.batches import Batch
from transformer_jax.model.transformer import Transformer
from transformer_jax.training.flops import step_flops
from transformer_jax.training.step import StepMetrics


class Meter:
    """Collects what steps report; time in `paused` is no time of training's."""

    def __init__(self, model: Transformer, peak: float) -> None:
        """Begin to count.

        Args:
            model: what is trained.
            peak: FLOP/s that the devices could do.
        """
        self._model, self._peak = model, peak
        self._clear()

    def _clear(self) -> None:
        self._metrics: list[StepMetrics] = []
        self._flops = self._paused = 0.0
        self._since = time.perf_counter()

    def add(self, metrics: StepMetrics, batch: Batch) -> None:
        """Count a step; waits for the one before last, so that the host runs no further ahead."""
        self._metrics.append(metrics)
        self._flops += step_flops(self._model.config, self._model.vocab_size, batch)
        if len(self._metrics) > 2:
            jax.block_until_ready(self._metrics[-3])

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out the time of what is done in this context."""
        jax.block_until_ready(self._metrics)
        began = time.perf_counter()
        try:
            yield
        finally:
            self._paused += time.perf_counter() - began

    def read(self) -> dict[str, float]:
        """Return means and rates since the last reading, and begin anew."""
        metrics = jax.device_get(self._metrics)
        seconds = time.perf_counter() - self._since - self._paused
        smoothed, nll, count = (
            math.fsum(float(getattr(m.loss, name)) for m in metrics)
            for name in ("smoothed", "nll", "count")
        )
        values = {
            "loss": smoothed / count,
            "perplexity": math.exp(min(nll / count, 700.0)),
            "gradient_norm": float(metrics[-1].gradient_norm),
            "tokens_per_second": count / seconds,
            "utilization": self._flops / seconds / self._peak,
        }
        self._clear()
        return values
