"""Training metrics between two reports: mean losses, tokens per second, and FLOP/s."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

import jax

from transformer_jax.training.step import StepMetrics

Sums = list[list[float]]
"""Each step's smoothed loss, negative log-likelihood, and number of tokens, summed over the
batch. All three values are 0 if the step was skipped."""


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

        `pending` contains the `pending_metrics` of an interrupted process, which the next report
        includes. `pending_flops` is the number of FLOPs in the pending steps, and `last` contains
        the metrics of the last pending step, if a report may follow without further steps.
        """
        self._peak, self._last = peak, last
        self._reset(pending, pending_flops)

    def _reset(self, pending: Sums, pending_flops: float) -> None:
        self._pending, self._pending_flops = pending, pending_flops
        self._metrics: list[StepMetrics] = []
        self._flops, self._paused_seconds = pending_flops, 0.0
        self._start = time.perf_counter()

    def add(self, metrics: StepMetrics, flops: float) -> None:
        """Record the latest step without waiting for it to finish."""
        self._metrics.append(metrics)
        self._last = metrics
        self._flops += flops

    def wait_for_earlier_step(self) -> int:
        """Wait until the devices have finished step n - `LAG`, where n is the latest step.

        The wait limits how far the host runs ahead of the devices, so that `heartbeat.beat` reports
        the progress of the devices. For the first `LAG` steps after a report, this method returns 0
        without waiting. For later steps, the method returns how many consecutive steps, up to step
        n - `LAG`, were skipped.
        """
        if len(self._metrics) <= self.LAG:
            return 0
        return int(jax.device_get(self._metrics[-1 - self.LAG].skipped_in_a_row))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Wait for all recorded steps; exclude the time spent in this context from the rates."""
        jax.block_until_ready(self._metrics)
        start = time.perf_counter()
        try:
            yield
        finally:
            self._paused_seconds += time.perf_counter() - start

    @property
    def last(self) -> StepMetrics:
        """The metrics of the latest step."""
        if self._last is None:
            raise ValueError("there is no step to report")
        return self._last

    def pending_metrics(self) -> Sums:
        """Return the sums for each step since the last report, including those in `pending`."""
        losses = jax.device_get([metrics.loss for metrics in self._metrics])
        return [*self._pending, *([float(x) for x in loss] for loss in losses)]

    def read(self) -> dict[str, float]:
        """Return the means and rates since the last report and reset them.

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
        sums = self.pending_metrics()
        seconds = time.perf_counter() - self._start - self._paused_seconds
        smoothed, nll, count = (math.fsum(column) for column in zip(*sums, strict=True))
        tokens = math.fsum(tokens for _, _, tokens in sums[len(self._pending) :])
        values: dict[str, float] = {}
        if count:
            values |= {"loss": smoothed / count, "perplexity": math.exp(min(nll / count, 700.0))}
        if math.isfinite(norm := float(self.last.gradient_norm)):
            values["gradient_norm"] = norm
        if skipped := sum(tokens == 0 for _, _, tokens in sums):
            values["skipped"] = skipped
        utilization = (self._flops - self._pending_flops) / seconds / self._peak
        values |= {"tokens_per_second": tokens / seconds, "flops": self._flops}
        self._reset([], 0.0)
        return values | {"utilization": utilization}
