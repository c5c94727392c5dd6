"""Test the preparation of JAX's backends and the count of compiled programs."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from pages import ROOT
from processes import run_python
from run_files import write_untrained_run

from transformer_jax.backend import Compilations, count_compilations, host_device
from transformer_jax.commands import COMMANDS
from transformer_jax.inference.trained_run import load
from transformer_jax.sharing.packaging import export_safetensors

TRAIN = "from transformer_jax.cli import main; raise SystemExit(main(['train', 'tiny']))"
DESCRIBE = """
import json, os
from transformer_jax.backend import describe_environment
print(json.dumps(describe_environment()))
print(json.dumps(os.environ.get("PJRT_NPROC")))
"""
# The files of an installed package that contains a plugin for NVIDIA GPUs.
PLUGIN = {
    "METADATA": "Metadata-Version: 2.1\nName: jax-cuda13-plugin\nVersion: 0.0.0\n",
    "entry_points.txt": "[jax_plugins]\nxla_cuda13 = no_such_module\n",
}


@pytest.mark.parametrize(
    ("setting", "value", "expected"),
    [
        ("JAX_PLATFORMS", "cuda", "with JAX_PLATFORMS=cuda: there is no such device"),
        pytest.param("JAX_PLATFORMS", "tpu", "JAX_PLATFORMS=tpu", marks=pytest.mark.exhaustive),
        pytest.param("JAX_PLATFORMS", "cpuu", "'cpuu' is not in the list", marks=pytest.mark.slow),
        pytest.param("XLA_FLAGS", "--xla_none=1", "--xla_none=1", marks=pytest.mark.slow),
        pytest.param(
            "XLA_FLAGS", "--xla_dump_hlo_as_text=no!", "no!", marks=pytest.mark.exhaustive
        ),
        ("JAX_NUM_CPU_DEVICES", "x", "correct or unset JAX_NUM_CPU_DEVICES"),
        pytest.param("JAX_ENABLE_X64", "maybe", "unset JAX_ENABLE_X64", marks=pytest.mark.slow),
        pytest.param(
            "JAX_NUM_CPU_DEVICES", "0", "JAX_NUM_CPU_DEVICES=0", marks=pytest.mark.exhaustive
        ),
    ],
)
def test_a_backend_that_cannot_start_is_one_line_before_anything_is_written(
    tmp_path: Path, setting: str, value: str, expected: str
) -> None:
    environment = {setting: value, "TRANSFORMER_JAX_CACHE": str(tmp_path / "cache")}
    process = run_python(TRAIN, cwd=tmp_path, PYTHONPATH=str(ROOT), **environment)
    assert process.returncode == 69
    [line] = process.stderr.splitlines()
    assert line.startswith("transformer-jax: JAX cannot start")
    assert expected in line
    if setting == "JAX_PLATFORMS":
        assert "; platforms on this machine: cpu; set JAX_PLATFORMS to one of them" in line
    written = [x for x in tmp_path.rglob("*") if x.is_file()]
    assert written == []


@pytest.mark.exhaustive
def test_no_command_writes_anything_if_the_backend_cannot_start(tmp_path: Path) -> None:
    run = write_untrained_run(tmp_path / "run", steps=(4,)).path
    export_safetensors(load(run), tmp_path / "exported")
    commands = {
        "params": ["tiny"],
        "train": ["tiny"],
        "resume": ["run"],
        "reproduce": ["run"],
        "sweep": ["tiny", "--seeds", "1"],
        "translate": ["run"],
        "evaluate": ["run"],
        "score": ["run", "--source", "run/run.json", "--target", "run/run.json"],
        "attention": ["run", "a", "--out", "attention.html"],
        "plot": ["run", "--kind", "schedule", "--out", "plot.svg"],
        "package": ["run", "--out", "package"],
        "export": ["run", "--out", "new", "--format", "safetensors"],
        "import": ["exported", "--out", "imported"],
    }
    # These commands do not need a device, or simulate one.
    assert set(commands) == set(COMMANDS) - {"compile", "diff", "prepare", "report", "status"}
    before = sorted(tmp_path.rglob("*"))
    code = "import json, sys; from transformer_jax.cli import main\n"
    code += "for words in json.loads(sys.argv[1]): print(main(words), flush=True)\n"
    code += "import transformer_jax; transformer_jax.load('run')"
    words = json.dumps([[name, *arguments] for name, arguments in commands.items()])
    process = run_python(
        code, words, cwd=tmp_path, PYTHONPATH=str(ROOT), JAX_PLATFORMS="cuda", XLA_FLAGS=""
    )
    assert process.stdout.split() == ["69"] * len(commands), process.stderr
    lines = process.stderr.splitlines()
    assert all(x.startswith("transformer-jax: JAX cannot start") for x in lines[: len(commands)])
    assert lines[-1].startswith("transformer_jax.errors.BackendError: JAX cannot start")
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("platforms", "flags", "expected"),
    [
        ("", "", {"triton_gemm": "false", "deterministic_ops": "true"}),
        pytest.param(
            "",
            "--xla_gpu_deterministic_ops=false",
            {"triton_gemm": "false", "deterministic_ops": "false"},
            marks=pytest.mark.slow,
        ),
        pytest.param("cpu", "", {}, marks=pytest.mark.slow),
    ],
)
def test_flags_for_gpus_are_set_if_a_plugin_is_installed_and_the_user_does_not_set_them(
    tmp_path: Path, platforms: str, flags: str, expected: dict[str, str]
) -> None:
    folder = tmp_path / "jax_cuda13_plugin-0.0.0.dist-info"
    folder.mkdir()
    for name, text in PLUGIN.items():
        (folder / name).write_text(text)
    environment = {"JAX_PLATFORMS": platforms, "XLA_FLAGS": flags}
    path = f"{tmp_path}:{ROOT}"
    process = run_python(DESCRIBE, cwd=tmp_path, PYTHONPATH=path, **environment)
    # The CPU's compiler accepts these flags, too.
    assert process.returncode == 0, process.stderr
    used = json.loads(process.stdout.splitlines()[0])["XLA_FLAGS"].split()
    pairs = dict(flag.removeprefix("--xla_gpu_").split("=") for flag in used)
    assert {name.removeprefix("enable_"): value for name, value in pairs.items()} == expected


def test_the_number_of_threads_is_recorded_and_hidden_from_child_processes(tmp_path: Path) -> None:
    code = "from transformer_jax.backend import start_backend\nstart_backend(3)\n" + DESCRIBE
    process = run_python(code, cwd=tmp_path, PYTHONPATH=str(ROOT))
    assert process.returncode == 0, process.stderr
    environment, variable = map(json.loads, process.stdout.splitlines())
    assert environment["cpu_threads"] == "3"
    assert variable is None


def test_a_fork_of_a_process_that_uses_jax_reports_it_instead_of_waiting(tmp_path: Path) -> None:
    code = """\
import os
from transformer_jax.backend import standard_settings, start_backend
from transformer_jax.errors import BackendError
start_backend()
if os.fork() == 0:
    for use in (start_backend, standard_settings().__enter__):
        try:
            use()
        except BackendError as error:
            print(error, flush=True)
    os._exit(0)
os.wait()
"""
    process = run_python(code, cwd=tmp_path, PYTHONPATH=str(ROOT))
    lines = process.stdout.splitlines()
    assert len(lines) == 2
    assert all("a fork of a process that uses JAX" in line for line in lines)


def test_the_host_device_is_a_cpu() -> None:
    assert host_device().platform == "cpu"


def test_each_compilation_is_counted_once_with_its_name() -> None:
    @jax.jit
    def negate(x: jax.Array) -> jax.Array:
        return -x

    with count_compilations() as found:
        for _ in range(2):
            negate(np.ones(3, np.float32))
        negate(np.ones(5, np.float32))
    negate(np.ones(7, np.float32))
    assert found.names == ["jit(negate)"] * 2
    assert found.seconds > 0


def test_the_summary_mentions_programs_from_the_cache() -> None:
    compilations = Compilations(["a", "b"], seconds=1.25)
    assert str(compilations) == "compilation: 2 programs in 1.2 s"
    compilations.cached = 1
    assert str(compilations) == "compilation: 2 programs in 1.2 s, 1 of them loaded from the cache"
