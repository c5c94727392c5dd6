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
        self._peak, self._last, self._num_runs = peak, last, 1
        self._metrics: list[StepMetrics] = []
        self._flops: list[float] = []
        self._reset(pending, pending_flops)

    def _reset(self, pending: Sums, pending_flops: float) -> None:
        self._pending, self._pending_flops = pending, pending_flops
        self._seconds = self._device_seconds = 0.0
        self.start_clock()

    def start_clock(self) -> None:
        """Start the clock again; the rates exclude the time since it was last read."""
        self._time = time.perf_counter()

    def _advance_clock(self) -> None:
        now = time.perf_counter()
        self._seconds += now - self._time
        self._device_seconds += (now - self._time) / self._num_runs
        self._time = now

    def add(self, metrics: StepMetrics, flops: float, num_runs: int = 1) -> None:
        """Record the latest step, which trains `num_runs` runs, without waiting for its end."""
        self._num_runs = num_runs
        self._advance_clock()
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
        self._advance_clock()
        try:
            yield
        finally:
            self.start_clock()

    def last(self, num_later: int = 0) -> StepMetrics:
        """Return the metrics of the step that started `num_later` steps before the latest one."""
        last = self._metrics[-1 - num_later] if num_later else self._last
        if last is None:
            raise ValueError("there is no step to report")
        return last

    def pending_metrics(self, num_later: int = 0) -> Sums:
        """Return the sums for each step since the last report, except the last `num_later`."""
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
            utilization: the FLOP/s as a fraction of the devices' peak. Runs that train in one
                program share the time equally, so this is the utilization by all of these runs.
        """
        last, sums = self.last(num_later), self.pending_metrics(num_later)
        count = len(sums) - len(self._pending)
        self._advance_clock()
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
        utilization = (flops - self._pending_flops) / self._device_seconds / self._peak
        values |= {"tokens_per_second": tokens / self._seconds, "flops": flops}
        self._metrics, self._flops = self._metrics[count:], self._flops[count:]
        self._reset([], 0.0)
        return values | {"utilization": utilization}
