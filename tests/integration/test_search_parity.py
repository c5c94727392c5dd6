"""Compare our searches with those of the transformers library and CTranslate2 on 100 sentences."""

from pathlib import Path
from typing import NamedTuple

import pytest
from example_configs import SMALL
from opus_mt import SOURCES, write_opus_mt
from training_runs import train

from experiments.search_comparison import compare_searches
from transformer_jax.inference.trained_run import Run, load
from transformer_jax.sharing.ctranslate2_format import export_ctranslate2, without_padding
from transformer_jax.sharing.marian_format import export_marian
from transformer_jax.sharing.marian_import import read_marian
from transformer_jax.sharing.verify import (
    CTranslate2System,
    MarianSystem,
    System,
    find_translations,
)

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Recommended")

# Use Marian's layer-normalization epsilon, so that both programs compute the same function.
TRAINED = SMALL.change(
    model={"layer_norm_epsilon": 1e-5},
    train={"steps": 200, "warmup_steps": 50, "checkpoint_every": 200, "bleu_every": 300},
)


class Model(NamedTuple):
    """A run, and a folder with the same model in Marian's format."""

    run: Run
    folder: Path


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("trained", marks=pytest.mark.exhaustive),
        pytest.param("imported", marks=pytest.mark.slow),
    ],
)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    torch, _ = (
        pytest.importorskip(name, reason=f"`pip install --group interop` installs {name}")
        for name in ("torch", "transformers")
    )
    # With such small matrices, PyTorch's threads spend more time waiting for each other than
    # computing.
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("models")
    if request.param == "imported":
        # Programs handle translations of the maximum length differently, so make translations end
        # early.
        write_opus_mt(path / "model", end_bias=8)
        return Model(read_marian(path / "model"), path / "model")
    run = load(train(TRAINED, path / "run"))
    export_marian(run, path / "model")
    return Model(run, path / "model")


@pytest.mark.parametrize("beam_size", [1, 4])
@pytest.mark.parametrize("program", ["transformers", "ctranslate2"])
def test_100_sentences_are_translated_as_in_other_programs(
    model: Model, program: str, beam_size: int, tmp_path: Path
) -> None:
    run = model.run
    system: System
    if program == "ctranslate2":
        export_ctranslate2(run, tmp_path / "ctranslate2")
        # If the export never predicts padding, our model must not predict it, either.
        run, system = without_padding(run), CTranslate2System(tmp_path / "ctranslate2")
    else:
        system = MarianSystem(model.folder)
    lines: list[str] = list(dict.fromkeys(SOURCES))[:100]
    if beam_size > 1:
        name = "beam_size" if program == "ctranslate2" else "num_beams"
        system.options |= {name: beam_size, "length_penalty": 1.0}
    penalty = {"length_penalty": "power", "length_penalty_alpha": 1.0}
    ours = find_translations(run, lines, beam_size=beam_size, **penalty)
    found = compare_searches(system, lines, ours)
    assert found.lines == 100
    if beam_size == 1:
        # Rounding can reverse the order of two nearly equal scores.
        assert found.equal >= 99
    # Our beam search continues until no other hypothesis can win, so only pruning can make it
    # miss a translation with a higher score.
    assert found.theirs_higher <= 3
    assert found.equal + found.ours_higher + found.theirs_higher == 100
