import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from example_configs import NUMBER_WORDS, SMALL

from transformer_jax.config import Config, DataConfig
from transformer_jax.config.loading import import_file
from transformer_jax.files import MAX_JSON_BYTES
from transformer_jax.sharing.model_card import find_languages, find_scores, write_card

SCORES = {
    "split": "test",
    "steps": [4, 8],
    "decode": {"beam_size": 4, "beam_end": "any", "length_penalty_alpha": 0.6},
    "perplexity": 5.123,
    "sentences": 1000,
    "bleu": 41.016,
    "bleu_signature": "nrefs:1|case:mixed|tok:none",
    "chrf": 60.0,
    "chrf_signature": "nrefs:1|nc:6",
}
VERSIONS = {"jax": "0.10.2", "transformer-jax": "0.1.0", "commit": "f1a9", "data": "0123"}


def write_scores(run: Path, name: str, **changes: Any) -> None:
    folder = run / "evaluations" / name
    folder.mkdir(parents=True)
    (folder / "scores.json").write_text(json.dumps(SCORES | changes), "utf-8")


def card_of(
    run: Path,
    config: Config = SMALL,
    languages: tuple[str, str] | None = None,
    data_note: str = "",
) -> str:
    return write_card(
        "name",
        config,
        VERSIONS,
        find_scores(run, [4, 8]),
        steps=[4, 8],
        parameters=1234567,
        dtype="float32",
        license_id="cc-by-4.0",
        languages=languages,
        data_note=data_note,
    )


def metadata_of(card: str) -> dict[str, Any]:
    _, front_matter, _ = card.split("---\n", 2)
    return yaml.safe_load(front_matter)


def test_the_metadata_is_yaml_and_has_only_what_is_known(tmp_path: Path) -> None:
    unknown = {"license": "cc-by-4.0", "library_name": "transformer-jax"}
    unknown["pipeline_tag"] = "translation"
    assert metadata_of(card_of(tmp_path)) == unknown
    write_scores(tmp_path, "test")
    wmt14 = SMALL.change(
        data={**NUMBER_WORDS, "corpus": "tfds", "dataset": "wmt14_translate/de-en"}
    )
    # In YAML, an unquoted "no" means false.
    assert metadata_of(card_of(tmp_path, wmt14, ("en", "no"))) == unknown | {
        "language": ["en", "no"],
        "datasets": ["wmt14"],
        "metrics": ["bleu", "chrf", "perplexity"],
    }


@pytest.mark.usefixtures("forget_parts")
def test_the_card_names_the_files_that_the_model_needs(tmp_path: Path) -> None:
    assert "import transformer_jax\n\nrun = " in card_of(tmp_path)
    file = tmp_path / "my_parts.py"
    file.write_text(
        "import transformer_jax\n"
        "transformer_jax.register('model.activation', 'once')(lambda x: x)\n"
    )
    import_file(str(file))
    card = card_of(tmp_path, SMALL.change(model={"activation": "once"}))
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    assert "`model.activation` `once`. Save these files in the working" in card
    assert f"\n- `my_parts.py`: SHA-256 `{digest}`\n" in card
    assert "import transformer_jax\nimport my_parts\n\nrun = " in card
    assert "`transformer-jax translate name --import my_parts.py < FILE`" in card
    assert str(tmp_path) not in card


@pytest.mark.parametrize(
    ("versions", "expected", "hidden"),
    [
        ({}, ["- Seed: 0.", "was trained only on the text above"], ["Initial parameters"]),
        (
            {"initial parameters": "parent, step 8, sha256 01"},
            ["- Initial parameters: `parent, step 8, sha256 01`.", "began with the parameters of"],
            ["only on the text", "initial parameters parent"],
        ),
        (
            {"data": "imported-0123"},
            ["imported from another program", "trained on unknown text"],
            ["only on the text", "Steps:", "Seed:"],
        ),
    ],
)
def test_the_card_states_only_what_is_known_about_the_training(
    versions: dict[str, str],
    expected: list[str],
    hidden: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in versions.items():
        monkeypatch.setitem(VERSIONS, name, value)
    card = card_of(tmp_path)
    assert all(text in card for text in expected)
    assert not any(text in card for text in hidden)


def test_the_card_states_the_data_type_of_computations(tmp_path: Path) -> None:
    assert "stored in float32. Computations use float32.\n" in card_of(tmp_path)
    half = card_of(tmp_path, SMALL.change(model={"dtype": "bfloat16"}))
    assert "stored in float32. Computations use bfloat16.\n" in half


def test_a_note_on_the_data_is_a_paragraph_of_the_section_on_data(tmp_path: Path) -> None:
    card = card_of(tmp_path, data_note="\nFrom [a page](https://example.org).\n")
    section = card.split("## Data\n\n")[1].split("\n\n## Training")[0].split("\n\n")
    assert section[0].startswith("Text files: ")
    assert section[1] == "From [a page](https://example.org)."
    assert section[2].startswith("- The vocabulary has 64 tokens.\n")
    assert card_of(tmp_path) == card.replace(f"{section[1]}\n\n", "")


def test_the_card_has_the_scores_of_these_checkpoints_with_their_signatures(tmp_path: Path) -> None:
    write_scores(tmp_path, "test")
    write_scores(tmp_path, "dev", split="dev", bleu=40.0)
    write_scores(tmp_path, "single", steps=[8], bleu=39.0)
    card = card_of(tmp_path)
    test = "| `test` | 1,000 | 4 | `any` | 0.6 | 41.02 | 60.00 | 5.123 |"
    assert test in card
    assert card.index(test) < card.index("| `dev` |")
    assert card.count("- BLEU `nrefs:1|case:mixed|tok:none`") == 1
    assert "39.00" not in card
    for fact in ("1,234,567", "`f1a9`", "jax 0.10.2", "4, 8 (the mean of 2", "| `6` | `1` |"):
        assert fact in card


def test_the_card_distinguishes_rules_for_the_end_of_a_beam(tmp_path: Path) -> None:
    for end in ("any", "tensor2tensor"):
        write_scores(tmp_path, end, decode={**SCORES["decode"], "beam_end": end})
    card = card_of(tmp_path)
    assert "| set | sentences | beam | beam end | alpha |" in card
    assert card.count("| 4 | `any` | 0.6 |") == card.count("| 4 | `tensor2tensor` | 0.6 |") == 1


@pytest.mark.parametrize("content", ["", "[]", "{}", "[" * 10**5, '{"steps": [4, 8]}'])
def test_a_damaged_evaluation_is_ignored(tmp_path: Path, content: str) -> None:
    write_scores(tmp_path, "test")
    write_scores(tmp_path, "other", bleu="# Heading", split="`|\n# Heading")
    (tmp_path / "evaluations" / "dev").mkdir()
    (tmp_path / "evaluations" / "dev" / "scores.json").write_text(content)
    assert len(find_scores(tmp_path, [4, 8])) == 1
    assert "# Heading" not in card_of(tmp_path)


def test_an_evaluation_that_is_too_large_is_ignored(tmp_path: Path) -> None:
    write_scores(tmp_path, "test")
    assert len(find_scores(tmp_path, [4, 8])) == 1
    with (tmp_path / "evaluations" / "test" / "scores.json").open("a") as file:
        file.write(" " * MAX_JSON_BYTES)
    assert find_scores(tmp_path, [4, 8]) == []


def test_text_of_an_evaluation_stays_in_its_cell(tmp_path: Path) -> None:
    write_scores(tmp_path, "test", split="a`|\n\n# Heading", bleu_signature="`\n# Heading")
    lines = card_of(tmp_path).split("\n")
    assert not [line for line in lines if line.startswith("# Heading")]


@pytest.mark.parametrize(
    ("data", "languages"),
    [
        (DataConfig(), ("en", "de")),
        (DataConfig(corpus="tfds", languages=("de", "en")), ("de", "en")),
        (DataConfig(corpus="text", train=("a/train.en", "train.tok.de.gz")), ("en", "de")),
        (DataConfig(corpus="text", train=("train.en.xz", "train.de.bz2")), ("en", "de")),
        (DataConfig(corpus="text", train=("train.src", "train.de")), None),
        (DataConfig(corpus="text", train=("en.txt", "de.txt")), None),
    ],
)
def test_languages_are_those_of_the_config_or_of_the_file_names(
    data: DataConfig, languages: tuple[str, str] | None
) -> None:
    assert find_languages(data) == languages
