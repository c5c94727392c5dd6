import json
import math
from pathlib import Path

import pytest

from transformer_jax.errors import StorageError
from transformer_jax.runs import FORMAT, checksums
from transformer_jax.runs.checkpoint_metadata import CheckpointMetadata

IDENTITY = {"model.d_model": 2, "data": "f1a9"}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A folder that contains the metadata of checkpoint 4."""
    folder = tmp_path / "run" / "checkpoints" / "4"
    folder.mkdir(parents=True)
    text = CheckpointMetadata(9.0, 1, {"skipped": 2}, 2.5).to_json(4, IDENTITY)
    (folder / "checkpoint.json").write_text(text)
    checksums.write(folder)
    return folder


def test_metadata_is_plain_json_that_names_its_run(checkpoint: Path) -> None:
    assert json.loads((checkpoint / "checkpoint.json").read_text()) == {
        "format": FORMAT,
        "step": 4,
        "perplexity": 9.0,
        "smoothed_loss": 2.5,
        "previous_step": 1,
        "custom_metadata": {"skipped": 2},
        "run": IDENTITY,
    }
    assert CheckpointMetadata.read(checkpoint, IDENTITY) == (9.0, 1, {"skipped": 2}, 2.5)


def test_a_checkpoint_of_another_run_is_rejected_with_the_differences(checkpoint: Path) -> None:
    other = {"model.d_model": 3, "data": "0", "seed": 7}
    differences = "data 'f1a9' -> '0', model.d_model 2 -> 3, seed None -> 7"
    with pytest.raises(StorageError, match=f"belongs to another run: {differences}"):
        CheckpointMetadata.read(checkpoint, other)


def test_a_config_field_that_a_checkpoint_lacks_has_its_default(checkpoint: Path) -> None:
    assert CheckpointMetadata.read(checkpoint, {**IDENTITY, "model.dropout": 0.1})
    with pytest.raises(StorageError, match=r"belongs to another run: model.dropout 0.1 -> 0.3$"):
        CheckpointMetadata.read(checkpoint, {**IDENTITY, "model.dropout": 0.3})


def test_a_checkpoint_of_another_format_is_rejected_in_one_line(checkpoint: Path) -> None:
    file = checkpoint / "checkpoint.json"
    content = json.loads(file.read_text())
    # In format 2, checkpoints had no `format` field.
    for stored in ({k: v for k, v in content.items() if k != "format"}, content | {"format": 99}):
        file.write_text(json.dumps(stored))
        checksums.write(checkpoint)
        with pytest.raises(StorageError, match=r"4 has format (99|None), .* only format \d+$"):
            CheckpointMetadata.read(checkpoint, IDENTITY)


def test_the_smoothed_loss_is_rounded_as_in_fairseq() -> None:
    # 2.5 nats are 3.6067376 bits.
    metadata = CheckpointMetadata(9.0, 1, {}, 2.5)
    assert metadata.score("smoothed_loss") == 3.607
    assert metadata.score("perplexity") == 9.0
    assert CheckpointMetadata(9.0, 1, {}).score("smoothed_loss") is None


@pytest.mark.parametrize("field", ["perplexity", "smoothed_loss", "previous_step"])
def test_a_number_that_is_too_large_is_an_error(checkpoint: Path, field: str) -> None:
    file = checkpoint / "checkpoint.json"
    number = math.inf if field == "previous_step" else 10**400
    file.write_text(json.dumps(json.loads(file.read_text()) | {field: number}))
    checksums.write(checkpoint)
    with pytest.raises(StorageError, match=r"^checkpoint 4 cannot be read: .*$"):
        CheckpointMetadata.read(checkpoint, IDENTITY)


@pytest.mark.parametrize("content", ["[]", "{}", "[" * 100_000, '{"format": 3, "step": "x"}', "\0"])
def test_invalid_metadata_with_valid_digests_is_an_error(checkpoint: Path, content: str) -> None:
    (checkpoint / "checkpoint.json").write_text(content)
    checksums.write(checkpoint)
    with pytest.raises((StorageError, checksums.CorruptionError)) as caught:
        CheckpointMetadata.read(checkpoint, IDENTITY)
    assert "\n" not in str(caught.value)
