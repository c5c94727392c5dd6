"""What a checkpoint holds beside arrays: its score, what training needs to go on, whose it is."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

from transformer_jax.config import Config
from transformer_jax.errors import StorageError
from transformer_jax.runs import checksums
from transformer_jax.runs.checksums import CorruptionError

NAME = "checkpoint.json"
# What a field that is younger than a checkpoint had when that was written.
DEFAULTS = {
    f"{section}.{key}": value
    for section, fields in Config().to_dict().items()
    for key, value in fields.items()
}


class CheckpointMetadata(NamedTuple):
    """Plain data, in a file of its own."""

    perplexity: float | None
    """On the development set; None unless the step is a scheduled one."""
    previous_step: int | None
    """The scheduled step before this one, whether it is still kept or not."""
    notes: dict[str, Any]
    """Whatever else training needs to go on."""

    @classmethod
    def read(cls, checkpoint: Path, identity: Mapping[str, Any]) -> Self:
        """Read the record of a checkpoint; its folder is named by its step.

        Raises:
            DamagedError: it is not as it was written.
            StorageError: it cannot be read, or is of another run than `identity` tells.
        """
        step = int(checkpoint.name)
        try:
            found = json.loads(checksums.read(checkpoint, NAME))
            if found["step"] != step:
                raise CorruptionError(f"it is of step {found['step']}")
            _check_identity(checkpoint, dict(found["run"]), identity)
            perplexity, after = found["perplexity"], found["previous_step"]
            return cls(
                None if perplexity is None else float(perplexity),
                None if after is None else int(after),
                dict(found["notes"]),
            )
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise StorageError(f"checkpoint {step} cannot be read: {error}") from error

    def write(self, folder: Path, step: int, identity: Mapping[str, Any]) -> None:
        """Write it to the folder of a checkpoint, with its step and whose it is."""
        content = {"step": step, **self._asdict(), "run": dict(identity)}
        text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
        (folder / NAME).write_text(text, "utf-8")


def _check_identity(checkpoint: Path, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    theirs = {k: v for k, v in DEFAULTS.items() if k in ours} | dict(theirs)
    differing = [
        f"{name} {theirs.get(name)!r} -> {ours.get(name)!r}"
        for name in sorted(theirs.keys() | ours.keys())
        if theirs.get(name) != ours.get(name)
    ]
    if differing:
        raise StorageError(
            f"checkpoint {checkpoint.name} of {checkpoint.parent.parent} is of another run: "
            f"{', '.join(differing)}"
        )
