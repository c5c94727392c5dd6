"""Test that JAX's settings neither change a run nor stop it."""

import json
from pathlib import Path

import pytest
from processes import TESTS, run_python

PROGRAM = """
import json, sys, warnings
sys.path.insert(0, sys.argv[1])
from example_configs import SMALL
import transformer_jax as tj
from transformer_jax.model.inspect import digest_params
from transformer_jax.progress import Note

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always", Note)
    run = tj.train(SMALL, "run", quiet=True)
    loaded = tj.load("run", average_checkpoints=2)
    attention = loaded.attention("one two").cross.dtype
    result = digest_params(run.params), digest_params(loaded.params), str(attention)
    lines = loaded.translate(["one two", "three"])
    scores = loaded.evaluate("dev").result["perplexity"]
notes = [str(note.message) for note in caught if issubclass(note.category, Note)]
print(json.dumps([result, lines, scores, [x for x in notes if "ignore" in x]]))
"""
# The names of JAX's settings and values that differ from their defaults.
SETTINGS = {
    "JAX_ENABLE_X64": "1",
    "JAX_NUMPY_DTYPE_PROMOTION": "strict",
    "JAX_DEBUG_NANS": "1",
    "JAX_DISABLE_JIT": "1",
    "JAX_TRANSFER_GUARD": "disallow",
    "JAX_CHECK_TRACER_LEAKS": "1",
}
OTHERS = {
    "JAX_NUMPY_RANK_PROMOTION": "raise",
    "JAX_DEFAULT_PRNG_IMPL": "rbg",
    "JAX_LOG_COMPILES": "1",
    "JAX_DEFAULT_DTYPE_BITS": "64",
}


def results(folder: Path, **environment: str) -> list[object]:
    folder.mkdir()
    arguments = PROGRAM, str(TESTS / "support")
    process = run_python(*arguments, cwd=folder, PYTHONPATH=str(TESTS.parent), **environment)
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout.splitlines()[-1])


@pytest.mark.exhaustive
def test_settings_of_jax_do_not_change_a_run(tmp_path: Path) -> None:
    *expected, notes = results(tmp_path / "defaults")
    assert notes == []
    *actual, notes = results(tmp_path / "settings", **SETTINGS, **OTHERS)
    assert actual == expected
    assert isinstance(notes, list)
    [note] = notes
    assert note.startswith("runs ignore ")
    assert set(SETTINGS) - set(note.removeprefix("runs ignore ").split(", ")) <= {
        # This setting combines three other settings.
        "JAX_TRANSFER_GUARD"
    }
