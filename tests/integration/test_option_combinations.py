"""Test that any combination of options trains or is rejected before anything is written."""

import random
import signal
import types
import typing
from pathlib import Path

import pytest
from example_configs import SMALL
from training_runs import signal_at_step

import transformer_jax
from transformer_jax.config import Config
from transformer_jax.config.architectures import unused_defaults
from transformer_jax.config.validation import MAX_COUNT, PartName, annotations
from transformer_jax.errors import ConfigError, DivergedError, RunInterrupted, TransformerJaxError

INTEGERS = (0, 1, 2, 3, 7, 8, 16, 50, 64, 1000, 2**31 - 1, 2**31, 2**63, 10**30, 10**400, -1)
NUMBERS = (0, 1e-320, 1e-30, 1e-6, 0.5, 0.999, 1, 10.0, 1e6, 1e30, 1e39, 1e308, 10**400)
# The fields that set the size of the model or of the text have moderate values, because a large
# model needs more memory than a test may use.
SIZES = {
    *("num_layers", "num_decoder_layers", "d_model", "d_ff", "num_heads", "num_kv_heads"),
    *("d_k", "d_v", "max_relative_position", "max_positions", "conv_kernel_width", "num_pairs"),
    *("max_length", "vocab_size", "source_vocab_size", "max_extra_length", "beam_size"),
}
# The values of these fields are files or other text, or require a download or a different device.
FIXED = {"train", "dev", "test", "folder", "dataset", "languages", "corpus", "task", "trackers"}

NUM_SLOW, NUM_COMBINATIONS = 6, 300


def draw(rng: random.Random, key: str, form: object, metadata: tuple[object, ...]) -> object:
    """Draw a value of a field, which may be invalid."""
    kinds = typing.get_args(form) if isinstance(form, types.UnionType) else (form,)
    if typing.get_origin(form) is typing.Literal:
        return rng.choice(typing.get_args(form))
    for rule in metadata:
        if isinstance(rule, PartName):
            return rng.choice(rule.own)
    if types.NoneType in kinds and rng.random() < 0.2:
        return None
    if bool in kinds:
        return rng.random() < 0.5
    if float in kinds:
        return rng.choice((*NUMBERS, float("nan"), float("inf")))
    # Programs of deep models take a long time to compile.
    limit = 3 if "layers" in key else 64
    values = [x for x in INTEGERS if key not in SIZES or x <= limit or x > MAX_COUNT]
    return rng.choice(values)


def draw_config(rng: random.Random) -> Config:
    """Change one to five fields of a small config; raise a ConfigError if a value is invalid."""
    fields = [
        (section, key, *pair)
        for section, (cls, _) in annotations(Config).items()
        for key, pair in annotations(cls).items()
        if key not in FIXED or section == "train"
    ]
    changes: dict[str, dict[str, object]] = {}
    for section, key, form, metadata in rng.sample(fields, rng.randint(1, 5)):
        changes.setdefault(section, {})[key] = draw(rng, key, form, metadata)
    architecture = changes.get("model", {}).get("architecture", "transformer")
    defaults = unused_defaults(str(architecture))
    model = {**defaults, **changes.pop("model", {})}
    every = {"train": {"checkpoint_every": 1, **changes.pop("train", {})}}
    return SMALL.change(model=model, **every, **changes)


def train_one_step(seed: int, path: Path) -> str:
    """Train a step with random options; return "trained", "diverged", or why they are invalid."""
    try:
        config = draw_config(random.Random(seed))
        with pytest.MonkeyPatch.context() as patch:
            signal_at_step(patch, 1, signal.SIGTERM)
            transformer_jax.train(config, path, quiet=True)
    except RunInterrupted as error:
        return "trained" if (path / "checkpoints" / "1").is_dir() else str(error)
    except DivergedError:
        return "diverged"
    except TransformerJaxError as error:
        reason = str(error)
    else:
        return "trained"
    assert "\n" not in reason
    assert not path.exists(), reason
    return reason


def test_many_combinations_of_options_are_valid_or_rejected_in_one_line() -> None:
    reasons: list[str] = []
    for seed in range(NUM_COMBINATIONS):
        try:
            draw_config(random.Random(seed))
        except ConfigError as error:
            reasons.append(str(error))
    assert 100 < len(reasons) < 250
    assert not any("\n" in reason for reason in reasons)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::transformer_jax.progress.Note")
@pytest.mark.parametrize(
    "seed",
    [
        *range(NUM_SLOW),
        *(pytest.param(x, marks=pytest.mark.exhaustive) for x in range(NUM_SLOW, NUM_COMBINATIONS)),
    ],
)
@pytest.mark.trials("a random combination of options")
def test_a_combination_of_options_trains_or_is_rejected(seed: int, tmp_path: Path) -> None:
    assert train_one_step(seed, tmp_path / "run")


@pytest.mark.parametrize("value", [10_001, 2**31 - 1, 2**63, 1e300])
def test_the_length_of_translations_is_bounded(value: object) -> None:
    with pytest.raises(TransformerJaxError, match=r"decode\.max_extra_length must be"):
        SMALL.change(decode={"max_extra_length": value})
