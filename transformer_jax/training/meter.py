"""Training metrics between two reports: mean losses, tokens per second, and FLOP/s."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

import jax

from transformer_jax.training.step import StepMetrics

Sums = list[list[float]]
"""Each step's smoothed loss, negative log-likelihood, and number of tokens; 0 if skipped."""


class Meter:
    """The metrics accumulated since the last report."""

    LAG = 2
    """The number of steps that the host can run ahead of the devices."""

    def __init__(
        self,
        peak: float,
        pending: Sums,
        pending_flops: float = 0.0,
        last: StepMetrics | None = None,
    ) -> None:
        """Start the clock. `peak` is the total peak FLOP/s of all devices.

        The next report includes `pending`, an interrupted process's `pending_metrics`, with their
        FLOPs and the metrics of their last step.
        """
        self._peak, self._last = peak, last
        self._metrics: list[StepMetrics] = []
        self._flops: list[float] = []
        self._reset(pending, pending_flops)

    def _reset(self, pending: Sums, pending_flops: float) -> None:
        self._pending, self._pending_flops = pending, pending_flops
        self._paused_seconds, self._start = 0.0, time.perf_counter()

    def add(self, metrics: StepMetrics, flops: float) -> None:
        """Record the latest step without waiting for it to finish."""
        self._metrics.append(metrics)
        self._flops.append(flops)
        self._last = metrics

    def wait_for_earlier_step(self) -> int:
        """Wait until the devices have finished step n - `LAG`, where n is the latest step.

        Return how many consecutive steps, up to that one, were skipped. If `read` has read that
        step, return 0 without waiting.
        """
        if len(self._metrics) <= self.LAG:
            return 0
        # Copy all metrics now, while later steps run, instead of at the next report.
        earlier = self._metrics[-1 - self.LAG] = jax.device_get(self._metrics[-1 - self.LAG])
        return int(earlier.skipped_in_a_row)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Wait for all recorded steps; exclude the time spent in this context from the rates."""
        jax.block_until_ready(self._metrics)
        start = time.perf_counter()
        try:
            yield
        finally:
            self._paused_seconds += time.perf_counter() - start

    def last(self, num_later: int = 0) -> StepMetrics:
        """Return the metrics of the step that started `num_later` steps before the latest one."""
        last = self._metrics[-1 - num_later] if num_later else self._last
        if last is None:
            raise ValueError("there is no step to report")
        return last

    def pending_metrics(self, num_later: int = 0) -> Sums:
        """Return the sums for each step since the last report, except `num_later` steps."""
        steps = self._metrics[: len(self._metrics) - num_later]
        losses = jax.device_get([metrics.loss for metrics in steps])
        return [*self._pending, *([float(x) for x in loss] for loss in losses)]

    def read(self, num_later: int = 0) -> dict[str, float]:
        """Return the means and rates since the last report and reset them.

        The latest `num_later` steps belong to the next report. The devices may still be running
        them.

        The means and FLOPs include the steps of an interrupted process; the rates do not. The means
        are omitted if all steps were skipped. `gradient_norm` is omitted if it is not finite, and
        `skipped` is omitted if it is 0.

        Returns:
            loss: the mean smoothed cross-entropy per token, in nats.
            perplexity: exp of the mean negative log-likelihood per token.
            gradient_norm: the gradient norm at the latest step, before clipping.
            skipped: the number of skipped steps.
            tokens_per_second: target tokens per second.
            flops: the FLOPs of all steps, excluding padding.
            utilization: the FLOP/s as a fraction of the devices' peak.
        """
        last, sums = self.last(num_later), self.pending_metrics(num_later)
        count = len(sums) - len(self._pending)
        seconds = time.perf_counter() - self._start - self._paused_seconds
        smoothed, nll, total = (math.fsum(column) for column in zip(*sums, strict=True))
        tokens = math.fsum(tokens for _, _, tokens in sums[len(self._pending) :])
        values: dict[str, float] = {}
        if total:
            values |= {"loss": smoothed / total, "perplexity": math.exp(min(nll / total, 700.0))}
        if math.isfinite(norm := float(last.gradient_norm)):
            values["gradient_norm"] = norm
        if skipped := sum(tokens == 0 for _, _, tokens in sums):
            values["skipped"] = skipped
        flops = sum(self._flops[:count], self._pending_flops)
        utilization = (flops - self._pending_flops) / seconds / self._peak
        values |= {"tokens_per_second": tokens / seconds, "flops": flops}
        self._metrics, self._flops = self._metrics[count:], self._flops[count:]
        self._reset([], 0.0)
        return values | {"utilization": utilization}
