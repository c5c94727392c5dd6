"""A run whose checkpoints have random parameters, for tests that do not need a trained model."""

from pathlib import Path

import jax
from rich.console import Console
from small import SMALL

from transformer_jax.baselines.build import build_model
from transformer_jax.config import Config
from transformer_jax.model.encoder_decoder import init_params
from transformer_jax.runs.checkpoint_manager import CheckpointManager
from transformer_jax.runs.run_folder import RunFolder
from transformer_jax.training.create_run import create_run


def write_untrained_run(
    path: Path, config: Config = SMALL, *, steps: tuple[int, ...] = (4, 8), scale: float = 1.0
) -> RunFolder:
    """Create a run whose scheduled checkpoints have different random parameters.

    Args:
        path: the path to the run.
        config: the run's config.
        steps: the step of each checkpoint.
        scale: a factor that multiplies all weight matrices. With a factor of 3, different lines
            get different translations.
    """
    run = create_run(config, path, Console(quiet=True))
    model = build_model(run.config.model, **run.vocabulary.sizes)
    with CheckpointManager(run.checkpoints, run.identity, keep=len(steps)) as checkpoints:
        for step in steps:
            params = init_params(model, jax.random.key(step))
            params = jax.tree.map(lambda x: x * scale if x.ndim > 1 else x, params)
            arrays = {"params": params}
            checkpoints.prepare_save(step, arrays)
            checkpoints.save(step, arrays, 10.0 / step, {})
    return run
