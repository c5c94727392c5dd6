"""Test the output of `compile` with a fake compiler."""

import importlib.util
import json
import os
from collections.abc import Callable

import jax
import pytest
from compilers import compile_by_formula

from transformer_jax.cli import main
from transformer_jax.compilation import environment, fit, programs, topologies
from transformer_jax.compilation.programs import StepProgram


def set_compiler(
    monkeypatch: pytest.MonkeyPatch, compiler: Callable[..., StepProgram] | None
) -> None:
    monkeypatch.setattr(fit, "compile_step", compiler)


@pytest.fixture(autouse=True)
def _no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "transformer_jax.commands.compilation.configure_environment", lambda **_: None
    )
    monkeypatch.setattr("transformer_jax.commands.sweeps.configure_environment", lambda **_: None)
    set_compiler(monkeypatch, compile_by_formula)
    devices = [None] * 64
    for module in ("transformer_jax.sweeps.estimates", topologies.__name__):
        monkeypatch.setattr(f"{module}.make_devices", lambda target: devices[: target.num_devices])


def run(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> tuple[str, str]:
    assert main(["compile", *arguments]) == code
    out, err = capsys.readouterr()
    return out, err.splitlines()[-1]


def test_a_config_that_fits_is_answered_in_one_line_per_target(
    capsys: pytest.CaptureFixture[str],
) -> None:
    out, _ = run(capsys, "tiny", "--target", "v5e", "h100:8", "--largest")
    assert out.splitlines() == [
        "v5e: 1 device with 15.75 GiB each, data",
        "  assumed shapes and vocabulary size; all numbers are per device",
        "  32 x (64 + 64) tokens: peak 5.00 GiB (32%), state 1.00 GiB (20% of it)",
        "    5.00 TFLOP (6.00 TFLOP in the program), compiled in 70 s",
        "tiny fits v5e (data): 5.00 GiB of 15.75 GiB per device",
        "h100:8: 8 devices with 59.33 GiB each, data",
        "  assumed shapes and vocabulary size; all numbers are per device",
        "  32 x (64 + 64) tokens: peak 1.50 GiB (3%), state 1.00 GiB (67% of it)",
        "    5.00 TFLOP (6.00 TFLOP in the program), compiled in 70 s",
        "    all-reduce bf16: 3, 2.00 GiB in total",
        "tiny fits h100:8 (data): 1.50 GiB of 59.33 GiB per device",
    ]


def test_every_batch_shape_is_compiled_for_every_kind_of_parallelism(
    capsys: pytest.CaptureFixture[str],
) -> None:
    out, _ = run(capsys, "tiny", "--target", "v5e:2x2", "--parallelism", "fsdp", "pmap", "--json")
    checks = json.loads(out)
    assert [c["parallelism"] for c in checks] == ["fsdp", "pmap"]
    for answer in checks:
        assert answer["fits"]
        assert [p["source_length"] for p in answer["programs"]] == [16, 32, 64]
        assert answer["programs"][0]["collectives"][0]["kind"] == "all-reduce"


def test_a_config_that_does_not_fit_ends_with_code_71_and_the_options_that_cure_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ("tiny", "--target", "v5e", "--data.batch-tokens", "8192", "--largest")
    out, line = run(capsys, *arguments, code=71)
    assert "fits" not in out
    assert line == (
        "transformer-jax: tiny does not fit v5e (data): a batch of 128 x (64 + 64) tokens needs "
        "17.00 GiB of 15.75 GiB per device; it fits with --model.remat (9.00 GiB) or with "
        "--train.gradient-accumulation-steps 2 (9.00 GiB)"
    )
    out, _ = run(capsys, *arguments, "--json", code=71)
    [answer] = json.loads(out)
    assert not answer["fits"]
    assert [suggestion["settings"] for suggestion in answer["suggestions"]] == [
        {"model.remat": True},
        {"train.gradient_accumulation_steps": 2},
    ]


def test_fit_prints_the_largest_batch(capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = run(capsys, "tiny", "--target", "v5e", "--fit")
    # The 14.75 GiB of free memory is enough for 7,552 source tokens and 7,552 target tokens.
    assert out.splitlines()[-1].startswith("tiny fits v5e (data) up to data.batch_tokens 7")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("targets", "has_gpu_flags"), [(["v5e"], False), (["h100"], True), (["v5e", "h100"], True)]
)
def test_xla_gets_flags_for_gpus_only_if_a_target_has_gpus(
    targets: list[str],
    has_gpu_flags: bool,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "transformer_jax.commands.compilation.configure_environment",
        environment.configure_environment,
    )
    monkeypatch.setattr(os, "environ", {**os.environ, "XLA_FLAGS": "--xla_dump_to=dump"})
    run(capsys, "tiny", "--target", *targets, "--largest")
    flags = ["--xla_dump_to=dump"]
    if has_gpu_flags:
        flags += [f"--{name}={value}" for name, value in environment.FLAGS.items()]
    assert os.environ["XLA_FLAGS"] == " ".join(flags)
    assert os.environ["JAX_PLATFORMS"] == "cpu"


@pytest.mark.parametrize(("target", "extra"), [("v5e", "tpu"), ("h100", "cuda13")])
def test_a_missing_compiler_is_reported_with_the_command_that_installs_it(
    target: str, extra: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(
        "transformer_jax.commands.compilation.configure_environment", lambda **_: None
    )
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    _, line = run(capsys, "tiny", "--target", target, code=2)
    assert line.endswith(f"pip install 'jax[{extra}]'")


@pytest.mark.slow
def test_a_dry_run_prints_the_devices_that_each_row_needs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["--data-from", "tiny", "--dry-run", "--target", "v5e:2x2"]
    arguments += ["--data.batch-tokens", "8192", "--rows", "A1", "--seeds", "1"]
    assert main(["sweep", "table3", *arguments]) == 0
    out = capsys.readouterr().out
    assert "2 rows x 1 seed = 2 runs" in out
    assert "base to A1: 2 v5e chips each" in out
    assert "GB per run" in out


CUDNN = ("--model.attention-implementation", "cudnn", "--model.dtype", "bfloat16")
CUDNN += ("--model.attention-dropout", "0")


def test_cudnn_is_rejected_for_tpus_before_anything_is_compiled(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_compiler(monkeypatch, None)
    _, line = run(capsys, "tiny", "--target", "h100", "v5e", *CUDNN, code=2)
    assert line == (
        "transformer-jax: model.attention_implementation cudnn needs NVIDIA GPUs, not v5e: use "
        "--model.attention-implementation full"
    )


def test_cudnn_is_accepted_for_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = run(capsys, "tiny", "--target", "h100", "--largest", *CUDNN)
    assert "tiny fits h100 (data)" in out


@pytest.mark.skipif(
    any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13)),
    reason="JAX's CUDA plugin is installed",
)
def test_a_missing_cudnn_is_reported_in_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_compiler(monkeypatch, programs.compile_step)
    monkeypatch.setattr(
        "transformer_jax.compilation.topologies.make_devices", lambda _: jax.devices()[:1]
    )
    _, line = run(capsys, "tiny", "--target", "h100", "--largest", *CUDNN, code=2)
    assert line == (
        "transformer-jax: JAX cannot find cuDNN: pip install 'jax[cuda13]', or use "
        "--model.attention-implementation full"
    )
