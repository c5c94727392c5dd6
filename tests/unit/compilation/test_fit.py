"""Use a fake compiler to test the searches for settings that fit in memory."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import jax
import pytest
from compilers import compile_by_formula

from transformer_jax.compilation import fit
from transformer_jax.compilation.fit import (
    Check,
    count_devices,
    find_largest_batch,
    find_suggestions,
)
from transformer_jax.compilation.programs import StepProgram
from transformer_jax.compilation.shapes import full_bucket
from transformer_jax.compilation.targets import Target, parse_target
from transformer_jax.config import Config
from transformer_jax.data.batches import Bucket

WIDE = Bucket(8, 64, 64, 0)


@dataclass
class Formula:
    """A fake compiler that computes memory use from state size, gradient size, and token count."""

    capacity: int
    state: int = 100
    gradients: int = 0
    num_devices: int = 4
    tokens: list[int] = field(default_factory=list)
    """The number of source tokens in each compiled batch."""

    def __call__(self, config: Config, bucket: Bucket) -> StepProgram:
        rows = -(-bucket.rows // self.num_devices) * self.num_devices
        self.tokens.append(rows * bucket.source)
        state = self.state // (self.num_devices if config.train.parallelism == "fsdp" else 1)
        activations = rows * bucket.source // self.num_devices
        activations //= config.train.gradient_accumulation_steps * (4 if config.model.remat else 1)
        peak = state + self.gradients + activations
        is_small = peak <= self.capacity
        lengths, sizes = (bucket.source, bucket.target), (state, state // 3)
        return StepProgram(
            rows, *lengths, is_small, peak, *sizes, self.capacity, 0.0, None, (), 0.0
        )


@pytest.mark.parametrize("capacity", [300, 5000, 12_345, 1_000_000])
@pytest.mark.parametrize("batch_tokens", [64, 4096, 300_000])
def test_the_largest_batch_fits_and_one_five_percent_larger_does_not(
    capacity: int, batch_tokens: int
) -> None:
    compiler = Formula(capacity)
    config = Config().change(data={"batch_tokens": batch_tokens})
    found = find_largest_batch(config, WIDE, compiler, compiler.num_devices)
    assert found is not None
    tokens, program = found
    assert program.fits
    assert program.rows * 64 == tokens
    limit = 4 * (capacity - compiler.state)
    # The number of rows in a batch is a multiple of eight.
    assert limit / 1.06 - 8 * 64 < tokens <= limit
    assert len(compiler.tokens) < 30
    assert full_bucket(WIDE, tokens).rows == program.rows


def test_no_batch_fits_if_the_state_is_too_large() -> None:
    assert find_largest_batch(Config(), WIDE, Formula(capacity=99), 4) is None


def suggestions_of(
    compiler: Formula, config: Config, bucket: Bucket = WIDE
) -> list[dict[str, object]]:
    program = compiler(config, bucket)
    assert not program.fits
    suggestions = find_suggestions(config, bucket, program, compiler, compiler.num_devices)
    assert all(suggestion.program.fits for suggestion in suggestions)
    return [
        {setting.name: setting.value for setting in suggestion.settings}
        for suggestion in suggestions
    ]


def test_every_option_that_is_enough_is_a_cure() -> None:
    # The activations need 128 bytes, but only 32 with remat or 64 with 2 micro-batches.
    assert suggestions_of(Formula(capacity=170), Config()) == [
        {"model.remat": True},
        {"train.gradient_accumulation_steps": 2},
        {"train.parallelism": "fsdp"},
    ]


@pytest.mark.parametrize("architecture", ["rnn", "conv"])
def test_an_architecture_that_cannot_recompute_layers_gets_the_other_cures(
    architecture: str,
) -> None:
    config = Config().change(model={"architecture": architecture})
    assert suggestions_of(Formula(capacity=170), config) == [
        {"train.gradient_accumulation_steps": 2},
        {"train.parallelism": "fsdp"},
    ]


def test_the_number_of_micro_batches_is_as_small_as_possible() -> None:
    bucket = Bucket(64, 64, 64, 0)
    compiler = Formula(capacity=100 + 33 + 150, gradients=33, num_devices=1)
    suggestions = suggestions_of(compiler, Config().change(model={"remat": True}), bucket)
    # With remat, the activations need 4,096 / 4 bytes, but only 150 bytes are free.
    assert suggestions == [{"train.gradient_accumulation_steps": 8}]


def test_fsdp_does_not_split_the_gradients_and_the_gathered_parameters() -> None:
    # Each of four devices holds 75 bytes of the state, 100 bytes of gathered parameters, and 100
    # bytes of gradients. The activations need 1,024 bytes, but only 60 bytes are free.
    compiler = Formula(capacity=75 + 200 + 60, state=300, gradients=200)
    fsdp = Config().change(model={"remat": True}, train={"parallelism": "fsdp"})
    suggestions = suggestions_of(compiler, fsdp, Bucket(256, 64, 64, 0))
    assert suggestions == [{"train.gradient_accumulation_steps": 32}]


@pytest.mark.parametrize("gradients", [100, 200])
def test_micro_batches_are_a_cure_even_if_the_gradients_leave_little_memory(gradients: int) -> None:
    # The activations need 800 bytes, but only 25 with 32 micro-batches and only 12 with 64.
    # Only 15 bytes are free.
    compiler = Formula(capacity=115 + gradients, gradients=gradients, num_devices=1)
    suggestions = suggestions_of(compiler, Config(), Bucket(80, 10, 10, 0))
    assert suggestions == [{"train.gradient_accumulation_steps": 64}]


def test_options_that_are_not_enough_alone_are_combined() -> None:
    # The activations need 32,768 bytes, but only 512 with 64 micro-batches, and only 128 if remat
    # is used as well.
    bucket = Bucket(2048, 64, 64, 0)
    [suggestion] = suggestions_of(Formula(capacity=300), Config(), bucket)
    assert suggestion == {
        "model.remat": True,
        "train.gradient_accumulation_steps": 64,
        "train.parallelism": "fsdp",
    }
    assert suggestions_of(Formula(capacity=100), Config(), bucket) == []


def test_a_single_device_is_not_told_to_use_fsdp() -> None:
    names = {
        name
        for suggestion in suggestions_of(Formula(170, num_devices=1), Config())
        for name in suggestion
    }
    assert "train.parallelism" not in names


@pytest.mark.parametrize(
    ("num_devices", "tried", "answer"),
    [(1, [1], None), (4, [1, 2, 4], None), (6, [1, 2, 4, 6], 6), (8, [1, 2, 4, 8], 8)],
)
def test_a_step_that_needs_more_than_four_devices_is_also_compiled_for_all(
    num_devices: int, tried: list[int], answer: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []

    def compile_step(
        config: Config, _target: Target, devices: Sequence[jax.Device], bucket: Bucket
    ) -> StepProgram:
        counts.append(len(devices))
        # The activations of 24 rows need 384 bytes on each of four devices, or 256 bytes on each of
        # six.
        return Formula(capacity=400, num_devices=len(devices))(config, bucket)

    monkeypatch.setattr(fit, "compile_step", compile_step)
    devices = jax.devices()[:1] * num_devices
    target = parse_target(f"h100:{num_devices}")
    assert count_devices(Config(), Bucket(24, 64, 64, 0), target, devices) == answer
    assert counts == tried


def test_the_answer_names_the_program_that_needs_the_most_memory() -> None:
    target = Target("v5e", (1, 1))
    buckets = [Bucket(rows, 16, 16, 0) for rows in (8, 32, 16)]
    programs = [compile_by_formula(Config(), target, [None], bucket) for bucket in buckets]
    assert Check(target, "data", "", tuple(programs)).largest.rows == 32
