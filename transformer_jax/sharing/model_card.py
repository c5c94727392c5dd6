"""Write a package's model card: Markdown with metadata for the Hugging Face Hub."""

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from transformer_jax.config import Config, DataConfig
from transformer_jax.console import shell_command
from transformer_jax.data.text_files import SUFFIXES
from transformer_jax.registry import describe_foreign
from transformer_jax.runs.run_folder import (
    IMPORTED,
    INITIAL,
    Dtype,
    evaluation_folders,
    read_scores,
)

CARD = """---
{front_matter}---

# {name}

{architecture} that translates {direction}. It has {parameters:,}
parameters, stored in {dtype}. Computations use {computation_dtype}.

## How to load it

Install transformer-jax, and load this folder:{needs}

```python
import transformer_jax
{imports}
run = transformer_jax.load({path})
print(run.translate(["{example}"]))
```

In a shell, `{command} < FILE` translates a file line by line.
`sha256sum -c SHA256SUMS` verifies the files.

## Data

{data}

## Training

{training}

## Scores

{scores}

## Limits

{limits}
"""


class StoredScores(NamedTuple):
    """The details that the model card shows about a stored evaluation."""

    row: str
    signatures: dict[str, str]


ARCHITECTURES = {
    "transformer": 'A Transformer ("Attention Is All You Need")',
    "rnn": "A recurrent encoder-decoder",
    "conv": "A convolutional encoder-decoder",
}


def find_scores(run: Path, steps: Sequence[int]) -> list[StoredScores]:
    """Return the scores that `evaluate` stored for the mean of the checkpoints at these steps."""
    scores: list[StoredScores] = []
    for path in reversed(evaluation_folders(run)):
        result = read_scores(path)
        if result.get("steps") != list(steps):
            continue
        # Another program may have written this file, so skip it if it is invalid.
        with contextlib.suppress(ValueError, KeyError, TypeError):
            decode, bleu, chrf = result["decode"], result["bleu"], result["chrf"]
            names = (result["split"], decode["beam_end"])
            split, end = (_code(str(name).replace("|", "")) for name in names)
            row = (
                f"| {split} | {result['sentences']:,} | {decode['beam_size']:d} | {end} "
                f"| {decode['length_penalty_alpha']:g} | {bleu:.2f} | {chrf:.2f} "
                f"| {result['perplexity']:.3f} |"
            )
            signatures = {"BLEU": result["bleu_signature"], "chrF": result["chrf_signature"]}
            scores.append(StoredScores(row, {k: _code(v) for k, v in signatures.items()}))
    return scores


def find_languages(data: DataConfig) -> tuple[str, str] | None:
    """Return the source and target languages, if the config or the file names specify them."""
    if data.corpus == "number_words":
        return "en", "de"
    if data.corpus == "tfds":
        return data.languages
    paths = map(Path, data.train or ())
    plain = [path.with_suffix("") if path.suffix in SUFFIXES else path for path in paths]
    suffixes = [path.suffix[1:] for path in plain]
    are_codes = len(set(suffixes)) == 2 and all(re.fullmatch("[a-z]{2}", x) for x in suffixes)
    return (suffixes[0], suffixes[1]) if are_codes else None


def write_card(
    name: str,
    config: Config,
    versions: Mapping[str, str],
    scores: Sequence[StoredScores],
    *,
    steps: Sequence[int],
    parameters: int,
    dtype: Dtype,
    license_id: str,
    languages: tuple[str, str] | None,
    data_note: str = "",
) -> str:
    """Return the text of a model card. `data_note` is Markdown that describes the data."""
    data = config.data
    metadata: dict[str, object] = {
        "language": languages,
        "license": license_id,
        "library_name": "transformer-jax",
        "pipeline_tag": "translation",
        "datasets": data.corpus == "tfds"
        and [data.dataset.split("/")[0].removesuffix("_translate")],
        "metrics": scores and ["bleu", "chrf", "perplexity"],
    }
    parts = describe_foreign(config.parts())
    files = {part["file"]: part["sha256"] for part in parts.values() if "file" in part}
    stems = [Path(file).stem for file in files]
    # JSON is valid YAML, and it quotes words such as "no" that YAML would read as booleans.
    front_matter = "".join(f"{k}: {json.dumps(v)}\n" for k, v in metadata.items() if v)
    return CARD.format(
        front_matter=front_matter,
        name=name,
        architecture=ARCHITECTURES.get(
            config.model.architecture, f"A model of architecture {config.model.architecture}"
        ),
        path=json.dumps(name, ensure_ascii=False),
        needs=_describe_needs(parts, files),
        imports="".join(f"import {x}\n" for x in stems if x.isidentifier()),
        command=shell_command("translate", Path(name), imports=list(files)),
        direction=f"from {languages[0]} to {languages[1]}" if languages else "text",
        parameters=parameters,
        dtype=dtype,
        computation_dtype=config.model.dtype,
        example="forty-two" if data.corpus == "number_words" else "One sentence.",
        data=_describe_data(data, versions, data_note),
        training=_describe_training(config, versions, steps),
        scores=_describe_scores(scores, dtype),
        limits=_describe_limits(config, versions),
    )


def _describe_needs(parts: Mapping[str, Mapping[str, str]], files: Mapping[str, str]) -> str:
    """Describe the parts of a model that are registered outside this package."""
    if not parts:
        return ""
    names = ", ".join(f"`{field}` {_code(part['name'])}" for field, part in parts.items())
    digests = "".join(f"\n- {_code(file)}: SHA-256 {_code(x)}" for file, x in files.items())
    where = "Save these files" if files else "Define these parts"
    end = f" in the working directory first:\n{digests}" if files else " first."
    return (
        "\n\nThe model uses parts that are neither in transformer-jax nor in this folder: "
        f"{names}. {where}{end}"
    )


def _describe_data(data: DataConfig, versions: Mapping[str, str], note: str) -> str:
    match data.corpus:
        case "number_words":
            text = f"{data.num_pairs:,} pairs of spelled-out numbers, generated by transformer-jax."
        case "tfds":
            text = f"The dataset {_code(data.dataset)} from TensorFlow Datasets."
        case "trees":
            text = "A treebank: sentences, and their linearized constituency trees."
        case "text" if versions["data"].startswith(IMPORTED):
            text = "The model was imported from another program. Its training text is not known."
        case "text":
            files = {"training": data.train, "development": data.dev, "test": data.test}
            named = (f"{k} {_code(' '.join(v))}" for k, v in files.items() if v is not None)
            text = f"Text files: {', '.join(named)}."
        case name:
            text = f"The corpus {_code(name)}, which is not part of transformer-jax."
    kind = "vocabulary" if data.source_vocab_size is None else "target vocabulary"
    paragraphs = "\n\n".join(filter(None, [text, note.strip()]))
    return f"""{paragraphs}

- The {kind} has {data.vocab_size:,} tokens.
- SHA-256 of the encoded text: {_code(versions["data"])}."""


def _describe_training(config: Config, versions: Mapping[str, str], steps: Sequence[int]) -> str:
    commit = versions.get("commit")
    hidden = ("commit", "data", "vocabulary", "source_vocabulary", INITIAL)
    software = ", ".join(f"{name} {x}" for name, x in versions.items() if name not in hidden)
    mean = f" (the mean of {len(steps)} checkpoints)" if len(steps) > 1 else ""
    is_imported = versions["data"].startswith(IMPORTED)
    own = [f"- Steps: {', '.join(map(str, steps))}{mean}.", f"- Seed: {config.train.seed}."]
    start = [f"- Initial parameters: {_code(versions[INITIAL])}."] if INITIAL in versions else []
    lines = [
        *([] if is_imported else own),
        *start,
        f"- transformer-jax commit: {_code(commit) if commit else 'not recorded'}.",
        f"- Versions: {_code(software)}.",
        "",
        "`run.json` contains the full config. These fields differ from the paper's base model:",
        "",
        "| field | base | here |",
        "|---|---|---|",
    ]
    differences = Config().differences(config).items()
    return "\n".join(lines) + "".join(
        f"\n| `{section}.{key}` | {_code(base)} | {_code(here)} |"
        for (section, key), (base, here) in differences
        if section != "data" or key in ("batch_tokens", "max_length", "max_ratio")
    )


def _describe_scores(scores: Sequence[StoredScores], dtype: Dtype) -> str:
    if not scores:
        return "The model had not been evaluated when it was packaged."
    lines = [
        "| set | sentences | beam | beam end | alpha | BLEU | chrF | perplexity |",
        "|---|---|---|---|---|---|---|---|",
        *(stored.row for stored in scores),
        "",
        "sacreBLEU signatures:",
        "",
    ]
    signatures = (f"- {name} {x}" for stored in scores for name, x in stored.signatures.items())
    lines += dict.fromkeys(signatures)
    if dtype != "float32":
        lines += ["", f"These scores were computed before the parameters were rounded to {dtype}."]
    return "\n".join(lines)


def _describe_limits(config: Config, versions: Mapping[str, str]) -> str:
    trained = "was trained only on the text above"
    if INITIAL in versions:
        trained = "began with the parameters of another model and was trained on the text above"
    elif versions["data"].startswith(IMPORTED):
        trained = "was trained on unknown text"
    return f"""- It translates single sentences of at most {config.model.max_lengths[0]:,} tokens.
- It {trained}. Translations of other kinds of text are worse.
- A character that the training text does not contain becomes \u2047.
- Translations can be wrong, and they can share the biases of the training text. Have a person
  check them where errors matter.
- The training text's terms of use apply in addition to the license."""


def _code(text: object) -> str:
    return f"`{' '.join(str(text).replace('`', '').split())}`"
