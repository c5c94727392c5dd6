"""Sums and rates between two reports."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

import jax

from transformer_jax.data.batches import Batch
from transformer_jax.distributed import heartbeat
from transformer_jax.model.transformer import Transformer
from transformer_jax.training.flops import step_flops
from transformer_jax.training.step import StepMetrics

# For each step: smoothed loss, negative log-likelihood, tokens; all 0 where it was skipped.
Sums = list[list[float]]


class Meter:
    """Collects what steps report; time in `paused` is no time of training's."""

    def __init__(self, model: Transformer, peak: float, earlier: Sums) -> None:
        """Begin to count.

        Args:
            model: what is trained.
            peak: FLOP/s that the devices could do.
            earlier: `unreported` of the process that stopped before: so a report after an
                interruption is the same as without one.
        """
        self._model, self._peak = model, peak
        self._clear(earlier)

    def _clear(self, earlier: Sums) -> None:
        self._earlier = earlier
        self._metrics: list[StepMetrics] = []
        self._flops = self._paused = 0.0
        self._since = time.perf_counter()

    def add(self, metrics: StepMetrics, batch: Batch) -> int:
        """Count a step; waits for the one before last, so that the host runs no further ahead.

        Returns:
            How many steps in a row, up to the one before last, were skipped.
        """
        self._metrics.append(metrics)
        self._flops += step_flops(self._model.config, self._model.vocab_size, batch)
        if len(self._metrics) < 3:
            return 0
        return int(jax.device_get(self._metrics[-3].skipped_in_a_row))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out the time of what is done in this context."""
        jax.block_until_ready(self._metrics)
        heartbeat.busy("compiling, scoring or saving")
        began = time.perf_counter()
        try:
            yield
        finally:
            self._paused += time.perf_counter() - began

    @property
    def last(self) -> StepMetrics:
        """What the newest step said."""
        return self._metrics[-1]

    def pending_metrics(self) -> Sums:
        """Return the sums of each step since the last reading."""
        found = jax.device_get([metrics.loss for metrics in self._metrics])
        return [*self._earlier, *([float(x) for x in loss] for loss in found)]

    def read(self) -> dict[str, float]:
        """Return means and rates since the last reading, and begin anew."""
        sums = self.pending_metrics()
        seconds = time.perf_counter() - self._since - self._paused
        smoothed, nll, count = (math.fsum(column) for column in zip(*sums, strict=True))
        now = math.fsum(tokens for _, _, tokens in sums[len(self._earlier) :])
        values: dict[str, float] = {}
        if count:
            values |= {"loss": smoothed / count, "perplexity": math.exp(min(nll / count, 700.0))}
        if math.isfinite(norm := float(self.last.gradient_norm)):
            values["gradient_norm"] = norm
        if skipped := sum(tokens == 0 for _, _, tokens in sums):
            values["skipped"] = skipped
        values["tokens_per_second"] = now / seconds
        values["flops"] = self._flops
        values["utilization"] = self._flops / seconds / self._peak
        self._clear([])
        return values
