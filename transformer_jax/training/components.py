"""A run's components: its text, model, batches, schedule, and sharding."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax

from transformer_jax.baselines.build import build_model
from transformer_jax.data.batches import Batches
from transformer_jax.data.prepare import Prepared
from transformer_jax.distributed.processes import SINGLE_PROCESS, ProcessGroup
from transformer_jax.errors import DataError
from transformer_jax.model.encoder_decoder import EncoderDecoder
from transformer_jax.model.inspect import parameter_counts
from transformer_jax.runs.run_folder import RunFolder
from transformer_jax.training.actions import ActionSchedule
from transformer_jax.training.flops import flops_of_lengths
from transformer_jax.training.sharding import SHARDINGS, DataParallel


@dataclass(frozen=True)
class RunComponents:
    """The parts of a run that do not change during training."""

    folder: RunFolder
    group: ProcessGroup
    prepared: Prepared
    model: EncoderDecoder
    batches: Batches
    schedule: ActionSchedule
    sharding: DataParallel

    def step_flops(self, step: int) -> float:
        """Return the FLOPs of a step (counted from 1) on all devices of all processes."""
        lengths = self.batches.lengths(step - 1)
        return flops_of_lengths(self.model.config, self.model.vocab_size, *lengths)

    def summary(self) -> list[str]:
        """Return lines that describe the devices, the model, and the data."""
        devices, config, report = self.sharding.devices, self.model.config, self.prepared.report
        processes = f" in {self.group.count} processes" if self.group.count > 1 else ""
        depths = "+".join(map(str, config.layers_per_stack))
        layers = f"{depths} layers, d_model {config.d_model}"
        size = parameter_counts(self.model)["total"]
        pairs = f"{report['corpus']}: {report['train']['kept']:,} pairs"
        return [
            f"device  {devices[0].device_kind} x {len(devices)}{processes}, jax {jax.__version__}",
            f"model   {layers}, {size:,} parameters",
            f"data    {pairs}, vocabulary of {self.model.vocab_size:,} tokens",
            f"batches {self.batches.summary}",
            *filter(None, [self.batches.describe_repetition(self.schedule.config.steps)]),
            *filter(None, [self.folder.config.describe_warmup()]),
        ]


def build_run_components(
    folder: RunFolder,
    group: ProcessGroup = SINGLE_PROCESS,
    *,
    like: RunComponents | None = None,
    devices: Sequence[jax.Device] | None = None,
) -> RunComponents:
    """Prepare a run's text, and build its model, batches, schedule, and sharding.

    If `like` is given, reuse that run's components; its text and batch shapes must be the same.
    `devices` defaults to all devices of all processes.
    """
    config = folder.config
    if like is not None:
        if folder.fingerprint != like.folder.fingerprint:
            raise DataError(f"{folder.path} and {like.folder.path} have different text")
        return replace(
            like,
            folder=folder,
            model=build_model(config.model, **like.prepared.vocabulary.sizes),
            batches=like.batches.with_seed(config.train.seed),
            schedule=ActionSchedule(config.train, like.batches.per_epoch),
        )
    prepared = folder.find_text()
    batches = prepared.batches(config)
    model = build_model(config.model, **prepared.vocabulary.sizes)
    schedule = ActionSchedule(config.train, batches.per_epoch)
    sharding = SHARDINGS[config.train.parallelism](devices)
    group.barrier()
    return RunComponents(folder, group, prepared, model, batches, schedule, sharding)
