"""A checkpoint's metadata: its score, its counters, and the identity of its run."""

import contextlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NamedTuple, Self

from transformer_jax.config import Config
from transformer_jax.errors import StorageError
from transformer_jax.files import INVALID_JSON, JsonObject
from transformer_jax.runs import FORMAT, checksums
from transformer_jax.runs.checksums import CorruptionError

NAME = "checkpoint.json"
# The number of reports in metrics.jsonl for earlier steps.
EARLIER_REPORTS = "earlier_reports"
# If a checkpoint predates a config field, the field's default value applies.
DEFAULTS = Config().by_field()


def count_expected_reports(run: Path) -> int:
    """Return the number of reports that the latest checkpoint implies, or 0 if it is unknown."""
    with contextlib.suppress(OSError, CorruptionError, *INVALID_JSON, KeyError):
        names = (path.name for path in (run / "checkpoints").iterdir())
        step = max(int(name) for name in names if name.isdecimal())
        content = json.loads(checksums.read(run / "checkpoints" / str(step), NAME))
        details = content["custom_metadata"]
        # If metrics are pending, no training report was scheduled at this step.
        has_train = step > 0 and not details["pending_metrics"]
        return int(details[EARLIER_REPORTS]) + has_train + (content["perplexity"] is not None)
    return 0


class DevScores(NamedTuple):
    """The scores of a model on the development set. Lower scores are better."""

    perplexity: float
    smoothed_loss: float
    """The loss that training minimizes, in nats per token, without dropout."""


class CheckpointMetadata(NamedTuple):
    """One checkpoint's metadata, as JSON data."""

    perplexity: float | None
    """The perplexity on the development set; None unless the step is scheduled."""
    previous_step: int | None
    """The previous scheduled step, whether or not its checkpoint still exists."""
    custom_metadata: JsonObject
    """The metadata required to resume training."""
    smoothed_loss: float | None = None
    """See `DevScores`; None if `perplexity` is None or if the checkpoint predates this field."""

    def score(self, metric: Literal["perplexity", "smoothed_loss"]) -> float | None:
        """Return a score; lower is better. As in fairseq, round the smoothed loss to 0.001 bits."""
        if metric == "perplexity" or self.smoothed_loss is None:
            return self.perplexity if metric == "perplexity" else None
        return round(self.smoothed_loss / math.log(2), 3)

    @classmethod
    def read(cls, checkpoint: Path, identity: Mapping[str, object]) -> Self:
        """Read a checkpoint's metadata, and check that the checkpoint belongs to this run.

        Raises:
            CorruptionError: the file differs from what was written, or belongs to a different step.
            StorageError: the file cannot be read, is in a different format, or belongs to a run
                with a different identity.
        """
        step = int(checkpoint.name)
        try:
            content = json.loads(checksums.read(checkpoint, NAME))
            if content.get("format") != FORMAT:
                raise StorageError(
                    f"{checkpoint} has format {content.get('format')}, but this version of "
                    f"transformer-jax reads only format {FORMAT}"
                )
            if content["step"] != step:
                raise CorruptionError(f"it belongs to step {content['step']}")
            stored = {k: v for k, v in DEFAULTS.items() if k in identity} | dict(content["run"])
            differences = [
                f"{name} {stored.get(name)!r} -> {identity.get(name)!r}"
                for name in sorted(stored.keys() | identity.keys())
                if stored.get(name) != identity.get(name)
            ]
            if differences:
                raise StorageError(
                    f"checkpoint {step} of {checkpoint.parent.parent} belongs to another run: "
                    f"{', '.join(differences)}"
                )
            perplexity, previous_step = content["perplexity"], content["previous_step"]
            smoothed_loss = content.get("smoothed_loss")
            return cls(
                None if perplexity is None else float(perplexity),
                None if previous_step is None else int(previous_step),
                dict(content["custom_metadata"]),
                None if smoothed_loss is None else float(smoothed_loss),
            )
        except (OSError, *INVALID_JSON, KeyError, AttributeError) as error:
            raise StorageError(f"checkpoint {step} cannot be read: {error}") from error

    def to_json(self, step: int, identity: Mapping[str, object]) -> str:
        """Return the contents of the file, which include the step and the run's identity."""
        content = {"format": FORMAT, "step": step, **self._asdict(), "run": dict(identity)}
        return json.dumps(content, indent=1, ensure_ascii=False) + "\n"
