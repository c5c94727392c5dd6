"""The components of a run: its text, model, batches, schedule, and sharding."""

import math
from dataclasses import dataclass

import jax

from transformer_jax.data.batches import Batches
from transformer_jax.data.prepare import Prepared, find_prepared
from transformer_jax.distributed import heartbeat
from transformer_jax.distributed.processes import SINGLE_PROCESS, ProcessGroup
from transformer_jax.model.build import build_transformer
from transformer_jax.model.inspect import abstract_params
from transformer_jax.model.transformer import Transformer
from transformer_jax.runs.run_directory import RunDirectory
from transformer_jax.training.schedule import Schedule
from transformer_jax.training.sharding import SHARDINGS, DataParallel


@dataclass(frozen=True)
class RunComponents:
    """The parts of a run that stay the same while it trains."""

    folder: RunDirectory
    group: ProcessGroup
    prepared: Prepared
    model: Transformer
    batches: Batches
    schedule: Schedule
    sharding: DataParallel

    def summary(self) -> list[str]:
        """Return lines about the devices, the model, and the data."""
        devices, layers = self.sharding.devices, self.model.config.num_layers
        processes = f" in {self.group.count} processes" if self.group.count > 1 else ""
        num_params = sum(math.prod(x.shape) for x in jax.tree.leaves(abstract_params(self.model)))
        report = self.prepared.report
        return [
            f"device  {devices[0].device_kind} x {len(devices)}{processes}, jax {jax.__version__}",
            f"model   {layers}+{layers} layers, d_model {self.model.config.d_model}, "
            f"{num_params:,} parameters",
            f"data    {report['corpus']}: {report['train']['kept']:,} pairs, "
            f"vocabulary of {self.model.vocab_size:,} tokens",
            f"batches {self.batches.summary}",
            *filter(None, [self.batches.describe_repetition(self.schedule.steps)]),
        ]


def build_run_components(
    folder: RunDirectory, group: ProcessGroup = SINGLE_PROCESS
) -> RunComponents:
    """Prepare the text of a run, and build its model, batches, schedule, and sharding.

    Raises:
        DataError: the text differs from the one that the run began with.
    """
    config = folder.config
    prepared = find_prepared(
        config.data,
        folder.vocabulary,
        folder.fingerprint,
        progress=lambda phase, *_: heartbeat.busy(phase),
    )
    batches = prepared.batches(config.data.batch_tokens, config.train.seed)
    components = RunComponents(
        folder=folder,
        group=group,
        prepared=prepared,
        model=build_transformer(config.model, **prepared.vocabulary.sizes),
        batches=batches,
        schedule=Schedule.from_config(config.train, batches.per_epoch),
        sharding=SHARDINGS[config.train.parallelism](),
    )
    group.barrier()
    return components
