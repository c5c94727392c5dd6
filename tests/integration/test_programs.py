"""Test which programs JAX compiles during the life of a run."""

import json
from collections import Counter
from pathlib import Path

import pytest
from processes import TESTS, run_python

from transformer_jax.evaluation.perplexity import MAX_SHAPES

PHASES = """
import json, sys
from pathlib import Path
import jax
sys.path.insert(0, sys.argv[2])
from example_configs import SMALL
import transformer_jax as tj
from transformer_jax.backend import count_compilations

counts, path = [], Path(sys.argv[1])
for steps in (8, 12):
    jax.clear_caches()
    with count_compilations() as found:
        tj.train(SMALL.change(train={"steps": steps}), path, resume=True, quiet=True)
    counts.append(found.names)
jax.clear_caches()
with count_compilations() as found:
    run = tj.load(path, average_checkpoints=3)
    run.evaluate("dev")
counts.append(found.names)
print(json.dumps(counts))
"""


@pytest.mark.slow
def test_a_run_compiles_its_step_for_each_shape_and_few_other_programs(tmp_path: Path) -> None:
    process = run_python(PHASES, str(tmp_path / "run"), str(TESTS / "support"), cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    phases = [Counter(names) for names in json.loads(process.stdout.splitlines()[-1])]
    # These programs have one shape for each range of sentence lengths.
    for programs in phases:
        assert programs.pop("jit(train_step)", 0) <= 2
        assert 1 <= programs.pop("jit(_losses)") <= MAX_SHAPES
        assert 1 <= programs.pop("jit(translate_batch)") <= 3
    training = {"jit(matmul)": 1, "jit(_learning_rate)": 1}
    # An operation outside `jax.jit` would be a separate program.
    assert phases == [
        {"jit(_init_state)": 1, **training},
        training,
        {"jit(_add)": 1, "jit(_divide)": 1},
    ]
