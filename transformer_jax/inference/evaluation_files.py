"""Store an evaluation in the run; the directory name describes how the split was translated.

The directory contains these files:

    evaluations/test-step8000-average5-beam4-alpha0.6/
        source.txt, hypothesis.txt, reference.txt
        sentences.csv            lengths and negative log-likelihood of each reference
        scores.json              scores, and how the translations were made
        baseline-NAME-*.json     comparisons with other runs (`significance`)
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformer_jax.config import DecodeConfig
from transformer_jax.errors import StorageError
from transformer_jax.inference.evaluate import Evaluation
from transformer_jax.inference.perplexity import SentenceScore
from transformer_jax.inference.trained_run import Run
from transformer_jax.runs.atomic_files import write_json


def save_evaluation(run: Run, evaluation: Evaluation) -> Path:
    """Write the lines, the sentence scores, and finally the scores; return their directory.

    Evaluations of single checkpoints have separate directories. Raises StorageError.
    """
    for single in evaluation.per_checkpoint:
        save_evaluation(run, single)
    folder = run.folder.path / "evaluations" / directory_name(evaluation.result)
    names = ("source.txt", "hypothesis.txt", "reference.txt")
    texts = {folder / name: encode_lines(x) for name, x in zip(names, evaluation[1:4], strict=True)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(path.exists() and path.read_bytes() != text for path, text in texts.items()):
            # The existing scores belong to other translations, so delete them before replacing the
            # lines.
            for scores in folder.glob("*.json"):
                scores.unlink()
        for path, text in texts.items():
            path.write_bytes(text)
        rows = [",".join(map(str, row)) for row in (SentenceScore._fields, *evaluation.sentences)]
        (folder / "sentences.csv").write_bytes(encode_lines(rows))
        write_json(folder / "scores.json", evaluation.result)
    except OSError as error:
        raise StorageError(f"the scores could not be saved: {error}") from error
    return folder


def directory_name(result: Mapping[str, Any]) -> str:
    """Return a name that is unique to the split, the checkpoints, and the decode config.

    It lists the fields that differ from the defaults, because a resumed run may change its config.
    """
    decode = dict(result["decode"])
    name = f"{result['split']}-step{result['step']}-average{result['average_checkpoints']}"
    name += f"-beam{decode.pop('beam_size')}-alpha{decode.pop('length_penalty_alpha'):g}"
    defaults = {**asdict(DecodeConfig()), "average_checkpoints": decode["average_checkpoints"]}
    changes = {key: value for key, value in decode.items() if value != defaults[key]}
    return name + "".join(f"-{key.replace('_', '-')}-{value}" for key, value in changes.items())


def encode_lines(lines: Sequence[str]) -> bytes:
    """Return the content of a text file with these lines."""
    return "".join(f"{line}\n" for line in lines).encode()
