"""Test that runs are created completely or not at all, and can start from existing parameters."""

import re
import warnings
from dataclasses import fields
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
from example_configs import SMALL
from run_files import write_untrained_run
from training_runs import QUIET, assert_same, resume, state_of, train

import transformer_jax
from transformer_jax import optional, registry
from transformer_jax.cli import main
from transformer_jax.config import Config, DataConfig, ModelConfig
from transformer_jax.config.loading import import_file
from transformer_jax.config.validation import ON_INIT_FROM, marked
from transformer_jax.data.prepare import prepare_text
from transformer_jax.errors import DataError, UsageError
from transformer_jax.model import Heads, MultiHeadAttention
from transformer_jax.model.inspect import digest_params
from transformer_jax.progress import Note
from transformer_jax.runs.checkpoint_manager import CheckpointManager
from transformer_jax.runs.run_folder import RunFolder
from transformer_jax.training.create_run import create_run
from transformer_jax.training.loop import run_training


@pytest.mark.slow
def test_a_run_starts_with_the_parameters_of_another(
    whole_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = SMALL.change(train={"seed": 3, "steps": 1})
    folder = create_run(config, tmp_path / "next", QUIET, init_from=whole_run)
    other = transformer_jax.load(whole_run)
    run = transformer_jax.load(folder.path)
    assert run.step == 0
    assert_same(run.params, other.params)
    digest = digest_params(other.params)
    assert run.folder.init_from == f"{whole_run.name}, step {other.step}, sha256 {digest}"
    # A run that began with random parameters is not another seed of this run.
    assert len(transformer_jax.compare([whole_run, folder.path]).groups) == 2
    assert main(["reproduce", str(folder.path)]) == 2
    assert run.vocabulary.target.model == other.vocabulary.target.model
    run_training(folder, QUIET)
    assert state_of(folder.path)[0] == 1
    assert main(["reproduce", str(folder.path)]) == 2
    assert "began with the parameters of another run: " in capsys.readouterr().err


def test_a_run_rejects_parameters_of_another_shape(whole_run: Path, tmp_path: Path) -> None:
    other = SMALL.change(model={"tie_embeddings": "none"})
    with pytest.raises(UsageError, match=r"do not fit this model: the parameter output_embedding"):
        create_run(other, tmp_path / "x", QUIET, init_from=whole_run)
    assert not (tmp_path / "x").exists()


# The source of a corpus whose identity does not depend on its lines.
LETTERS = """
import transformer_jax

@transformer_jax.register("data.corpus", "letters")
class Letters:
    splits = ("train", "dev")
    name = identity = "letters"

    def __init__(self, config):
        pass

    def count(self, split):
        return 50

    def read(self, split, start=0):
        yield from [(" ".join("{letters}"), "{letters}")] * (50 - start)
"""

# Overrides for the model section of `SMALL`. The error message names the first field of each
# override.
OTHER_FUNCTIONS: list[dict[str, Any]] = [
    {"num_layers": 2},
    {"num_decoder_layers": 2},
    {"d_model": 32},
    {"d_ff": 48},
    {"activation": "gelu"},
    {"num_heads": 4, "d_k": 4, "d_v": 4},
    {"d_k": 4},
    {"d_v": 4},
    {"positions": "rotary"},
    {"attention_score": "dot_product"},
    {"attention_window": 3},
    {"attention_bias": True},
    {"output_bias": True},
    {"decoder_start": "padding"},
    {"layer_norm": "pre"},
    {"layer_norm_epsilon": 1e-5},
    {"norm": "rms_norm"},
    {"feed_forward": "swiglu"},
    {"feed_forward_bias": False},
    {"num_kv_heads": 1},
    {"query_key_norm": True},
]
# Config fields that cannot affect what the model computes unless another field also changes.
WITH_OTHERS = {
    *("architecture", "rnn_cell", "rnn_input_feeding", "conv_kernel_width"),
    *("max_relative_position", "position_buckets"),
    # All implementations in this package compute the same function.
    "attention_implementation",
}


@pytest.mark.parametrize("change", OTHER_FUNCTIONS, ids=lambda change: next(iter(change)))
def test_a_run_rejects_parameters_of_another_function(
    change: dict[str, Any], whole_run: Path, tmp_path: Path
) -> None:
    field = next(iter(change))
    value = getattr(SMALL.model, field)
    if field == "num_decoder_layers":
        value = SMALL.model.num_layers
    message = f"were trained with model.{field} {value}, not {change[field]}: use model.{field}="
    with pytest.raises(UsageError, match=re.escape(message)):
        create_run(SMALL.change(model=change), tmp_path / "x", QUIET, init_from=whole_run)
    assert not (tmp_path / "x").exists()


LEARNED = SMALL.change(model={"positions": "learned"}, decode={"max_extra_length": 0})
FORTY = LEARNED.change(model={"max_positions": 40})


@pytest.mark.parametrize(
    ("trained", "new", "field", "value"),
    [
        (LEARNED, LEARNED.change(model={"max_length": 48}), "max_length", 64),
        (LEARNED, FORTY, "max_positions", None),
        (FORTY, LEARNED, "max_positions", 40),
        (FORTY, FORTY.change(model={"max_length": 48}), None, None),
    ],
    ids=["other length", "new limit", "no limit", "same limit"],
)
def test_learned_positions_fix_the_lengths_that_determine_their_number(
    trained: Config, new: Config, field: str | None, value: object, tmp_path: Path
) -> None:
    other = write_untrained_run(tmp_path / "other", trained, steps=(4,)).path
    if field is None:
        create_run(new, tmp_path / "new", QUIET, init_from=other)
        return
    message = f"were trained with model.{field} {value}, not .*: use model.{field}={value}$"
    with pytest.raises(UsageError, match=message):
        create_run(new, tmp_path / "new", QUIET, init_from=other)


@pytest.mark.parametrize(
    ("out_of_range", "advice"),
    [
        ("error", "model.max_length and model.max_positions, or set .* to clamp"),
        ("clamp", "model.max_length"),
    ],
)
def test_a_line_that_is_too_long_names_the_options_that_limit_it(
    out_of_range: str, advice: str, tmp_path: Path
) -> None:
    model = {"max_length": 16, "max_positions": 16, "out_of_range_positions": out_of_range}
    config = LEARNED.change(model=model, data={"max_length": 16})
    with pytest.raises(DataError, match=rf"reads at most 16: raise {advice}$"):
        create_run(config, tmp_path / "x", QUIET)


def test_every_field_of_the_model_is_free_or_determines_the_function() -> None:
    determining = {next(iter(change)) for change in OTHER_FUNCTIONS} | WITH_OTHERS
    free = marked(ModelConfig, ON_INIT_FROM)
    assert not determining & free
    assert determining | free == {field.name for field in fields(ModelConfig)}


@pytest.mark.slow
def test_free_fields_and_unused_fields_may_differ(whole_run: Path, tmp_path: Path) -> None:
    config = SMALL.change(
        model={
            "num_decoder_layers": 1,
            "dropout": 0.2,
            "attention_implementation": "blockwise",
            "dtype": "bfloat16",
            "logits_dtype": "bfloat16",
            "remat": True,
            "max_length": 48,
            "max_relative_position": 3,
            "position_buckets": 4,
        }
    )
    folder = create_run(config, tmp_path / "next", QUIET, init_from=whole_run)
    run, other = (transformer_jax.load(path) for path in (folder.path, whole_run))
    assert_same(run.params, other.params)


def test_parameters_of_another_architecture_are_rejected(whole_run: Path, tmp_path: Path) -> None:
    default = ModelConfig()
    unused = {f: getattr(default, f) for f in ("d_ff", "num_heads", "d_k", "d_v")}
    config = SMALL.change(model={"architecture": "rnn", **unused})
    with pytest.raises(UsageError, match=r"with model.architecture transformer, not rnn: use "):
        create_run(config, tmp_path / "x", QUIET, init_from=whole_run)


def test_a_killed_creation_leaves_nothing_behind(
    whole_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(CheckpointManager, "save", interrupt)
    with pytest.raises(KeyboardInterrupt):
        create_run(SMALL, tmp_path / "next", QUIET, init_from=whole_run)
    assert not list(tmp_path.iterdir())


TWO_VOCABULARIES = SMALL.change(
    data={"vocab_size": 48, "source_vocab_size": 56}, train={"steps": 1, "bleu_every": 2}
)


def test_source_and_target_can_have_separate_vocabularies(tmp_path: Path) -> None:
    vocabulary = create_run(TWO_VOCABULARIES, tmp_path / "run", QUIET).vocabulary
    assert (len(vocabulary.source), len(vocabulary.target)) == (56, 48)
    # Only the target vocabulary contains German umlauts.
    umlaut = "fünf"
    assert vocabulary.target.decode(vocabulary.target.encode([umlaut])) == [umlaut]
    assert vocabulary.source.decode(vocabulary.source.encode([umlaut])) != [umlaut]


@pytest.mark.exhaustive
def test_a_run_with_two_vocabularies_trains_translates_and_resumes(tmp_path: Path) -> None:
    path = train(TWO_VOCABULARIES, tmp_path / "run")
    run = transformer_jax.load(path)
    assert run.params["source_embedding"]["table"].shape == (56, 16)
    assert run.params["embedding"]["table"].shape == (48, 16)
    assert len(run.translate(["one", "two"])) == 2
    follower = create_run(TWO_VOCABULARIES, tmp_path / "next", QUIET, init_from=path)
    assert follower.vocabulary.source.model == run.vocabulary.source.model
    resume(path, train={"steps": 2})
    assert state_of(path)[0] == 2


@pytest.mark.parametrize(
    ("data", "message"),
    [({"bleu_tokenizer": "ko-mecab"}, "needs mecab_ko"), ({"task": "parsing"}, "reference 1")],
)
def test_text_that_cannot_be_scored_leaves_no_run_folder(
    data: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optional, "find_spec", lambda _: None)
    with pytest.raises((DataError, UsageError), match=message):
        create_run(SMALL.change(data=data), tmp_path / "run", QUIET)
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("forget_parts")
def test_a_part_that_cannot_be_called_is_named_and_leaves_no_run_folder(tmp_path: Path) -> None:
    transformer_jax.register("train.optimizer", "nothing")(lambda _config, _rate: None)
    config = SMALL.change(train={"optimizer": "nothing"})
    with pytest.raises(AttributeError) as error:
        create_run(config, tmp_path / "run", QUIET)
    expected = "This run uses train.optimizer 'nothing' of test_create_run.py. "
    assert any(note.startswith(expected) for note in error.value.__notes__)
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("forget_parts")
def test_a_part_whose_output_would_be_broadcast_is_rejected(tmp_path: Path) -> None:
    transformer_jax.register("model.activation", "narrow")(lambda x: x.sum(axis=-1, keepdims=True))
    with pytest.raises(ValueError, match="an activation function must return shape"):
        create_run(SMALL.change(model={"activation": "narrow"}), tmp_path / "run", QUIET)
    assert not (tmp_path / "run").exists()


class Unmasked(MultiHeadAttention):
    """Attention that ignores the mask."""

    def attend_heads(self, heads: Heads, train: bool, /) -> Any:
        return super().attend_heads(heads._replace(mask=jnp.ones_like(heads.mask)), train)


@pytest.mark.usefixtures("forget_parts")
@pytest.mark.parametrize(
    ("part", "dtype", "expected"),
    [
        (Unmasked, "float32", ["later target tokens and padding of the source"]),
        (MultiHeadAttention, "bfloat16", []),
    ],
)
def test_a_part_that_ignores_the_mask_is_noted(
    part: type[MultiHeadAttention], dtype: str, expected: list[str], tmp_path: Path
) -> None:
    transformer_jax.register("model.attention_implementation", "mine")(part)
    config = SMALL.change(model={"attention_implementation": "mine", "dtype": dtype})
    with warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always")
        create_run(config, tmp_path / "run", QUIET)
    found = (re.search(r"predictions depend on (.*), so", str(x.message)) for x in notes)
    assert [match[1] for match in found if match] == expected


@pytest.mark.usefixtures("forget_parts")
def test_the_text_of_a_corpus_whose_file_changes_is_prepared_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, found = tmp_path / "letters.py", list[str]()
    for letters in ("abcd", "wxyz"):
        registry._parts["data.corpus"].pop("letters", None)
        registry._digests.clear()
        monkeypatch.setenv(registry.IMPORTS, "")
        file.write_text(LETTERS.format(letters=letters), encoding="utf-8")
        import_file(str(file))
        prepared = prepare_text(DataConfig(corpus="letters", vocab_size=16))
        found.append(prepared.lines("dev")[0][0])
    assert found == ["a b c d", "w x y z"]


def test_normalization_travels_with_the_vocabulary_of_a_run(tmp_path: Path) -> None:
    config = SMALL.change(data={"normalization": "spaces"})
    path = create_run(config, tmp_path / "run", QUIET).path
    tokenizer = RunFolder.open(path).vocabulary.source
    odd, plain = tokenizer.encode(["one\u00a0\u200bhundred", "one hundred"])
    assert odd == plain
    with pytest.raises(UsageError, match=r"data.normalization none, not spaces: use "):
        create_run(
            config, tmp_path / "x", QUIET, init_from=write_untrained_run(tmp_path / "y").path
        )


def test_text_that_the_vocabulary_of_another_run_lacks_is_noted(tmp_path: Path) -> None:
    other = write_untrained_run(tmp_path / "other", steps=(8,))
    names = {"train": ("train.en", "train.de"), "dev": ("dev.en", "dev.de")}
    for split, pair in names.items():
        (tmp_path / pair[0]).write_text("one two three four\n" * 20)
        (tmp_path / pair[1]).write_text(("\u65e5\u672c" if split == "dev" else "drei") + "\n" * 20)
    text = {k: tuple(str(tmp_path / name) for name in pair) for k, pair in names.items()}
    config = other.config.change(data={"corpus": "text", **text})
    with pytest.warns(Note) as caught:
        create_run(config, tmp_path / "next", QUIET, init_from=other.path)
    (line,) = [str(warning.message) for warning in caught if "lacks" in str(warning.message)]
    assert line.startswith("dev target: ")
