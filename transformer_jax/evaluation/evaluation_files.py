"""Store an evaluation in a subfolder of the run, named after the split, checkpoints, and search.

The folder contains these files:

    evaluations/test-step8000-average5-beam4-alpha0.6/
        source.txt, hypothesis.txt, reference.txt
        sentences.csv            the lengths and the negative log-likelihood of each pair
        scores.json              scores, how the translations were produced, and the digests of
                                 this file and of the files above
        baseline-NAME-*.json     comparisons with other runs (`significance`)

The first run of an ensemble stores the evaluations of the ensemble in `ensembles/` instead.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from transformer_jax.config import DecodeConfig
from transformer_jax.data.corpora import bleu_tokenizer
from transformer_jax.errors import StorageError, storage_errors
from transformer_jax.evaluation.evaluate import Evaluation
from transformer_jax.evaluation.perplexity import SentenceScore
from transformer_jax.evaluation.scores import bleu_signature, choose_tokenizer
from transformer_jax.files import (
    MAX_VOCABULARY_BYTES,
    JsonObject,
    read_json,
    read_json_if_valid,
    read_limited,
    write_json,
)
from transformer_jax.inference.history import SCORE_NAMES
from transformer_jax.inference.trained_run import Run
from transformer_jax.remote.copies import delete, uploading
from transformer_jax.runs.metrics_file import is_number
from transformer_jax.runs.run_folder import RunFolder


def save_evaluation(run: Run, evaluation: Evaluation) -> Path:
    """Write the texts, the sentence scores, and finally the overall scores; return the folder.

    Evaluations of individual checkpoints have separate folders. An evaluation replaces an
    earlier one only if both have the same split, checkpoints, and decode config.
    """
    for single in evaluation.per_checkpoint:
        save_evaluation(run, single)
    # Code that reads the scores of a run looks only in the folder "evaluations".
    kind = "ensembles" if "members" in evaluation.result else "evaluations"
    folder = run.folder.path / kind / folder_name(evaluation.result)
    names = ("source.txt", "hypothesis.txt", "reference.txt")
    texts = {folder / name: encode_lines(x) for name, x in zip(names, evaluation[1:4], strict=True)}
    written = [*names, "sentences.csv", "scores.json"]
    problem = f"the scores could not be saved in {run.folder.path}"
    with uploading(folder, written), storage_errors(problem):
        folder.mkdir(parents=True, exist_ok=True)
        if any(path.exists() and path.read_bytes() != text for path, text in texts.items()):
            # The comparisons belong to the old texts. The old scores remain until the new ones
            # replace them, so `status` always finds scores. Until then, the digests in the old
            # scores do not match the new texts.
            for comparison in folder.glob("baseline-*.json"):
                delete(comparison)
        rows = [",".join(map(str, row)) for row in (SentenceScore._fields, *evaluation.sentences)]
        texts[folder / "sentences.csv"] = encode_lines(rows)
        for path, text in texts.items():
            path.write_bytes(text)
        digests = {path.name: hashlib.sha256(text).hexdigest() for path, text in texts.items()}
        write_json(folder / "scores.json", {**evaluation.result, "files": digests})
    return folder


def read_evaluation_file(folder: Path, name: str) -> bytes:
    """Return the contents of an evaluation's file, such as "hypothesis.txt"."""
    with storage_errors(f"the translations in {folder} cannot be read"):
        content = read_limited(folder / name, MAX_VOCABULARY_BYTES)
        digests = read_json(folder / "scores.json").get("files")
    expected = digests.get(name) if isinstance(digests, dict) else None
    if expected not in (None, hashlib.sha256(content).hexdigest()):
        raise StorageError(f"{folder / name} has changed since it was written: evaluate again")
    return content


def read_translations(folder: Path) -> tuple[list[str], list[str]]:
    """Return the hypotheses and references from an evaluation's folder."""
    contents = [read_evaluation_file(folder, f"{x}.txt") for x in ("hypothesis", "reference")]
    try:
        # Only a newline ends a line, because lines can contain other control characters.
        hypotheses, references = (content.decode().split("\n")[:-1] for content in contents)
    except UnicodeDecodeError as error:
        raise StorageError(f"the translations in {folder} are not UTF-8: {error}") from error
    if len(hypotheses) != len(references):
        raise StorageError(
            f"{folder} has {len(hypotheses)} translations but {len(references)} references"
        )
    return hypotheses, references


def find_result(
    folder: RunFolder, split: str, steps: Sequence[int], decode: DecodeConfig
) -> JsonObject | None:
    """Return the stored result of an evaluation with these settings, or None if there is none.

    The settings include `data.bleu_tokenizer`, which a resumed run may change. A result is
    ignored if a score or `by_length` is missing, for example because a user has edited the file.
    """
    settings = {
        "split": split,
        "step": steps[-1],
        "steps": list(steps),
        "average_checkpoints": len(steps),
        "decode": asdict(replace(decode, average_checkpoints=len(steps))),
    }
    path = folder.path / "evaluations" / folder_name(settings)
    result = read_json_if_valid(path / "scores.json")
    result.pop("files", None)
    if not result:
        return None
    try:
        _, references = read_translations(path)
    except StorageError:
        return None
    tokenizer = choose_tokenizer(bleu_tokenizer(folder.config.data), references)
    settings["bleu_signature"] = bleu_signature(tokenizer)
    is_complete = "by_length" in result and all(is_number(result.get(x)) for x in SCORE_NAMES)
    return result if is_complete and settings.items() <= result.items() else None


def folder_name(result: JsonObject) -> str:
    """Return a folder name that is unique to the split, checkpoints, decode config, and members.

    The name contains the decode fields that differ from the defaults. It does not depend on the
    run's config, because `resume` can change it.
    """
    decode = dict(result["decode"])
    name = f"{result['split']}-step{result['step']}-average{result['average_checkpoints']}"
    alpha = decode.pop("length_penalty_alpha")
    # The `g` format is shorter, but it rounds to six significant digits.
    digits = f"{alpha:g}" if float(f"{alpha:g}") == alpha else repr(alpha)
    name += f"-beam{decode.pop('beam_size')}-alpha{digits}"
    defaults = {**asdict(DecodeConfig()), "average_checkpoints": decode["average_checkpoints"]}
    changes = {key: value for key, value in decode.items() if value != defaults[key]}
    if members := result.get("members"):
        digest = hashlib.sha256(json.dumps(members).encode()).hexdigest()[:8]
        changes[f"of_{len(members)}"] = digest
    return name + "".join(f"-{key.replace('_', '-')}-{value}" for key, value in changes.items())


def encode_lines(lines: Sequence[str]) -> bytes:
    """Return the UTF-8 contents of a text file with these lines."""
    return "".join(f"{line}\n" for line in lines).encode()
