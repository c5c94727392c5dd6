"""Group runs that differ only in their seeds."""

import re
from collections.abc import Sequence

from transformer_jax.config import Config
from transformer_jax.errors import UsageError
from transformer_jax.runs.run_folder import RunFolder

# The name of a run folder in a sweep, as in sweeps/table3/base/seed-0.
SEED_FOLDER = re.compile(r"seed-\d+")


def group_runs(folders: Sequence[RunFolder]) -> dict[str, tuple[RunFolder, ...]]:
    """Group runs by all config fields except the seed, and by their start, and label each group.

    The label is the name of the group's first run (for a run in a sweep, the name of its row), or
    the run's path if another group already has this name.
    """
    if len({folder.path.resolve() for folder in folders}) < len(folders):
        raise UsageError("a run is listed twice")
    groups: dict[tuple[Config, str], list[RunFolder]] = {}
    for folder in folders:
        if folder.fingerprint != folders[0].fingerprint:
            raise UsageError(
                f"{folder.path} and {folders[0].path} were trained on different text or with "
                f"different vocabularies: their metrics cannot be compared"
            )
        key = folder.config.change(train={"seed": 0}), folder.init_from
        groups.setdefault(key, []).append(folder)
    labeled: dict[str, tuple[RunFolder, ...]] = {}
    for runs in groups.values():
        path = runs[0].path.resolve()
        name = path.parent.name if SEED_FOLDER.fullmatch(path.name) else path.name
        # A relative path can equal another run's name, so the absolute path is the fallback.
        labels = (name, str(runs[0].path), str(path))
        labeled[next(label for label in labels if label not in labeled)] = tuple(runs)
    return labeled
