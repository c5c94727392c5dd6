"""Test that models imported from the opus-mt format match those in the transformers library."""

import json
import pickle
import shutil
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from opus_mt import PAIRS, SOURCES, write_opus_mt
from safetensors.numpy import load_file, save_file

from transformer_jax.cli import main
from transformer_jax.errors import UsageError
from transformer_jax.inference.trained_run import Run, load
from transformer_jax.model.build import build_transformer
from transformer_jax.sharing.ctranslate2_format import export_ctranslate2, without_padding
from transformer_jax.sharing.marian_format import export_marian
from transformer_jax.sharing.marian_import import read_marian
from transformer_jax.sharing.packaging import export_safetensors, read_safetensors
from transformer_jax.sharing.parameters import read_torch_arrays
from transformer_jax.sharing.verify import (
    CTranslate2System,
    MarianSystem,
    verify,
)
from transformer_jax.special_tokens import EOS, PAD, UNKNOWN

torch: Any = None
transformers: Any = None
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Recommended"),
]

LINES = [*SOURCES[:7], "forty-two q ½"]


@pytest.fixture(scope="module", autouse=True)
def _packages() -> None:
    """Import PyTorch and the transformers library, which load slowly, only if these tests run."""
    global torch, transformers
    torch, transformers = (
        pytest.importorskip(name, reason=f"`pip install --group interop` installs {name}")
        for name in ("torch", "transformers")
    )


class Imported(NamedTuple):
    """The same model in the transformers library and in this package."""

    folder: Path
    marian: Any
    path: Path
    """The imported run."""
    run: Run


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Imported:
    path = tmp_path_factory.mktemp("opus")
    marian = write_opus_mt(path / "opus-mt-en-de")
    assert main(["import", str(path / "opus-mt-en-de"), "--out", str(path / "run")]) == 0
    return Imported(path / "opus-mt-en-de", marian, path / "run", load(path / "run"))


@pytest.fixture
def float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def test_the_config_has_every_option_of_the_model(imported: Imported) -> None:
    model, data = imported.run.config.model, imported.run.config.data
    assert model.layers_per_stack == (2, 1)
    assert (model.activation, model.decoder_start) == ("swish", "padding")
    assert model.attention_bias
    assert model.output_bias
    assert (model.layer_norm_epsilon, model.max_length) == (1e-5, 512)
    assert data.vocab_size == imported.marian.config.vocab_size
    decode = imported.run.config.decode
    assert (decode.beam_size, decode.length_penalty, decode.length_penalty_alpha) == (4, "power", 1)


def test_tokens_are_those_of_the_marian_tokenizer(imported: Imported) -> None:
    theirs = transformers.MarianTokenizer.from_pretrained(imported.folder)
    source, target = imported.run.vocabulary
    order = np.array(source.table.order)
    lines = [*LINES, ">>deu<< forty-two", "  two   spaces "]
    for line, tokens in zip(lines, source.encode(lines), strict=True):
        assert order[tokens].tolist() == theirs(line)["input_ids"]
        assert tokens[-1] == EOS
    # "q" is in neither source.spm nor vocab.json, and "▁two" is only in source.spm.
    for line in ("forty q", "two"):
        assert UNKNOWN in source.encode([line])[0]
    # In a line of text, the name of a special token is treated as ordinary text.
    assert source.encode(["</s><pad>"])[0].count(EOS) == 1
    assert PAD not in source.encode(["</s><pad>"])[0]
    every = [list(range(len(target)))[::step] for step in (1, -1, 7)]
    for tokens in every:
        text = theirs.decode(order[tokens].tolist(), skip_special_tokens=True)
        assert target.decode([tokens]) == [text]


def logits_of(run: Run, source: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Return the logits that this package computes in float64."""
    config = replace(run.config.model, dtype="float64")
    model = build_transformer(config, **run.vocabulary.sizes)
    params = jax.tree.map(lambda x: jnp.asarray(x, "float64"), run.params)
    logits = jax.jit(model.apply)({"params": params}, jnp.asarray(source), jnp.asarray(target))
    return np.asarray(logits)


def their_logits(marian: Any, source: np.ndarray, target: np.ndarray, pad: int) -> np.ndarray:
    """Return the float64 logits that the transformers library computes with unrounded sinusoids."""
    marian = marian.double()
    width = marian.config.d_model
    positions = marian.config.max_position_embeddings
    angle = np.arange(positions)[:, None] / 10000 ** (np.arange(0, width, 2) / width)
    table = torch.tensor(np.concatenate([np.sin(angle), np.cos(angle)], axis=1))
    for stack in (marian.model.encoder, marian.model.decoder):
        stack.embed_positions.weight.data = table
    start = np.full((len(target), 1), marian.config.decoder_start_token_id)
    decoder_input = np.concatenate([start, target[:, :-1]], axis=1)
    with torch.no_grad():
        return marian(
            input_ids=torch.tensor(source),
            attention_mask=torch.tensor(source != pad),
            decoder_input_ids=torch.tensor(decoder_input),
        ).logits.numpy()


def assert_equal_logits(run: Run, marian: Any) -> None:
    """Compare the logits of both libraries for two random sentence pairs."""
    rng = np.random.default_rng(1)
    source_order, target_order = (
        np.arange(len(t)) if t.table is None else np.array(t.table.order) for t in run.vocabulary
    )
    source = rng.integers(4, len(source_order), (2, 9))
    source[0, 6:] = PAD
    target = rng.integers(4, len(target_order), (2, 7))
    ours = logits_of(run, source, target)
    theirs = their_logits(
        marian, source_order[source], target_order[target], marian.config.pad_token_id
    )
    assert ours.dtype == np.float64
    # The distributions are peaked, so a wrong mask or scale would change them.
    assert np.asarray(jax.nn.softmax(theirs)).max() > 0.25
    np.testing.assert_allclose(ours, theirs[..., target_order], rtol=0, atol=1e-10)


@pytest.mark.usefixtures("float64")
def test_logits_in_float64_are_those_of_transformers(imported: Imported) -> None:
    marian = transformers.MarianMTModel.from_pretrained(imported.folder).eval()
    assert_equal_logits(imported.run, marian)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_separate_embeddings_have_the_same_logits(activation: str, tmp_path: Path) -> None:
    is_tied = activation == "gelu"
    marian = write_opus_mt(
        tmp_path / "model",
        activation_function=activation,
        share_encoder_decoder_embeddings=False,
        tie_word_embeddings=is_tied,
    )
    run = read_marian(tmp_path / "model")
    assert run.config.model.tie_embeddings == ("target" if is_tied else "none")
    assert_equal_logits(run, marian)
    export_marian(run, tmp_path / "again")
    assert_same_arrays(tmp_path / "again", tmp_path / "model")


@pytest.mark.exhaustive
@pytest.mark.usefixtures("float64")
def test_a_model_that_normalizes_first_equals_pegasus(imported: Imported, tmp_path: Path) -> None:
    """Pegasus is Marian with layer normalization before each sub-layer and after each stack."""
    folder = shutil.copytree(imported.folder, tmp_path / "model")
    settings = json.loads((folder / "config.json").read_text("utf-8"))
    config = transformers.PegasusConfig(**{**settings, "model_type": "pegasus"})
    pegasus = transformers.PegasusForConditionalGeneration(config).eval()
    state = pegasus.state_dict()
    arrays = load_file(folder / "model.safetensors")
    for name in state:
        if name in arrays:
            state[name] = torch.tensor(arrays[name])
        elif name.endswith(("encoder.layer_norm.weight", "decoder.layer_norm.weight")):
            arrays[name] = np.linspace(0.5, 1.5, 16, dtype="f4")
            arrays[name.replace("weight", "bias")] = np.linspace(-1, 1, 16, dtype="f4")
            state[name] = torch.tensor(arrays[name])
            state[name.replace("weight", "bias")] = torch.tensor(
                arrays[name.replace("weight", "bias")]
            )
        elif name.endswith(("embed_tokens.weight", "lm_head.weight")):
            state[name] = torch.tensor(arrays["model.shared.weight"])
    pegasus.load_state_dict(state)
    from safetensors.numpy import save_file

    save_file(arrays, folder / "model.safetensors")
    settings |= {"normalize_before": True, "add_final_layer_norm": True}
    (folder / "config.json").write_text(json.dumps(settings))
    run = read_marian(folder)
    assert run.config.model.layer_norm == "pre"
    assert_equal_logits(run, pegasus)
    with pytest.raises(UsageError, match=r"cannot express model\.layer_norm pre"):
        export_marian(run, tmp_path / "again")


def test_greedy_translations_are_those_of_generate(imported: Imported) -> None:
    result = verify(imported.run, MarianSystem(imported.folder), LINES)
    assert (result.sentences, result.equal) == (len(LINES), len(LINES))
    assert result.score_difference < 2e-3
    translations = imported.run.translate(LINES, beam_size=1)
    # The comparison is meaningful only if different lines have different translations.
    assert len(set(translations)) > len(LINES) / 2


@pytest.mark.exhaustive
def test_ctranslate2_translates_an_imported_model_as_the_run(
    imported: Imported, tmp_path: Path
) -> None:
    export_ctranslate2(imported.run, tmp_path / "model")
    result = verify(without_padding(imported.run), CTranslate2System(tmp_path / "model"), LINES)
    assert result.equal == len(LINES)
    assert result.score_difference < 2e-3


def assert_same_arrays(one: Path, other: Path) -> None:
    ours, theirs = (load_file(path / "model.safetensors") for path in (one, other))
    assert ours.keys() == theirs.keys()
    for name, array in theirs.items():
        assert ours[name].dtype == array.dtype
        assert ours[name].tobytes() == array.tobytes(), name


def assert_same_run(one: Run, other: Run) -> None:
    jax.tree.map(np.testing.assert_array_equal, one.params, other.params)
    assert jax.tree.structure(one.params) == jax.tree.structure(other.params)
    assert one.config == other.config
    assert [t.digest for t in one.vocabulary] == [t.digest for t in other.vocabulary]


def test_export_after_import_is_the_identity(imported: Imported, tmp_path: Path) -> None:
    export_marian(imported.run, tmp_path / "again")
    assert_same_arrays(tmp_path / "again", imported.folder)
    for name in ("source.spm", "target.spm"):
        assert (tmp_path / "again" / name).read_bytes() == (imported.folder / name).read_bytes()
    vocabularies = (
        json.loads((path / "vocab.json").read_bytes())
        for path in (imported.folder, tmp_path / "again")
    )
    assert len({tuple(x.items()) for x in vocabularies}) == 1
    # Importing the exported folder also gives the same run.
    assert_same_run(read_marian(tmp_path / "again"), imported.run)
    export_safetensors(imported.run, tmp_path / "safetensors")
    assert_same_run(read_safetensors(tmp_path / "safetensors"), imported.run)


def test_a_file_of_pytorch_gives_the_same_run(imported: Imported, tmp_path: Path) -> None:
    folder = shutil.copytree(imported.folder, tmp_path / "model")
    (folder / "model.safetensors").unlink()
    state = transformers.MarianMTModel.from_pretrained(imported.folder).state_dict()
    # Old model folders also contain the sinusoids and copies of the embeddings.
    assert {"lm_head.weight", "model.encoder.embed_positions.weight"} <= state.keys()
    for is_zip in (True, False):
        weights = folder / "pytorch_model.bin"
        torch.save(state, weights, _use_new_zipfile_serialization=is_zip)
        assert_same_run(read_marian(folder), imported.run)


def test_weights_in_bfloat16_are_converted(imported: Imported, tmp_path: Path) -> None:
    folder = shutil.copytree(imported.folder, tmp_path / "model")
    state = transformers.MarianMTModel.from_pretrained(imported.folder).state_dict()
    torch.save({k: x.bfloat16() for k, x in state.items()}, folder / "pytorch_model.bin")
    weights = load_file(folder / "model.safetensors")
    rounded = {k: x.astype(jnp.bfloat16) for k, x in weights.items()}
    save_file(rounded, folder / "model.safetensors")
    one = read_marian(folder)
    (folder / "model.safetensors").unlink()
    for run in (one, read_marian(folder)):
        for params in (one.params, imported.run.params):
            jax.tree.map(
                lambda x, y: np.testing.assert_allclose(x, y, rtol=2**-8), run.params, params
            )


class Payload:
    """An object that creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def compress(path: Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(200 << 20))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda x: torch.save(Payload(x.parent / "executed"), x), "which could be code"),
        (lambda x: x.write_bytes(pickle.dumps(Payload(x.parent / "executed"))), "could be code"),
        (lambda x: torch.save([1, 2], x), "it contains something other than arrays"),
        (lambda x: torch.save({"a": 1}, x), "it contains something other than arrays"),
        (lambda x: torch.save({"a": torch.ones(2)}, x), "has an unknown parameter 'a'"),
        (lambda x: x.write_bytes(b""), "pytorch_model.bin cannot be read: "),
        (lambda x: x.write_bytes(b"PK\x03\x04" + bytes(100)), "pytorch_model.bin cannot be read: "),
        (lambda x: x.write_bytes(b"\x80\x02X\x05\x00"), "pytorch_model.bin cannot be read: "),
        (compress, "pytorch_model.bin is invalid: it is compressed"),
    ],
)
def test_a_hostile_file_of_pytorch_is_refused_in_one_line(
    imported: Imported,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    damage: Callable[[Path], object],
    message: str,
) -> None:
    folder = shutil.copytree(imported.folder, tmp_path / "model")
    (folder / "model.safetensors").unlink()
    damage(folder / "pytorch_model.bin")
    assert main(["import", str(folder), "--out", str(tmp_path / "run")]) == 74
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (folder / "executed").exists()
    assert not (tmp_path / "run").exists()


def test_an_old_version_of_pytorch_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", "2.9.1+cpu")
    with pytest.raises(UsageError, match=r"needs torch 2.10 or later, and this is 2.9.1\+cpu$"):
        read_torch_arrays(tmp_path / "x.bin", {}, {}, 100)


def test_attention_of_an_imported_run_begins_with_padding(imported: Imported) -> None:
    attention = imported.run.attention("forty-two")
    assert attention.source_tokens[-1] == "<EOS>"
    assert attention.decoder_input_tokens[0] == "<PAD>"
    assert (len(attention.encoder), len(attention.cross)) == (2, 1)
    np.testing.assert_allclose(attention.cross.sum(axis=-1), 1, atol=1e-5)


@pytest.mark.exhaustive
def test_an_imported_run_translates_and_is_evaluated_on_files(
    imported: Imported,
    tmp_path: Path,
    capfdbinary: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = imported.run.translate(LINES, beam_size=1)
    (tmp_path / "in.txt").write_text("".join(f"{line}\n" for line in LINES), "utf-8")
    with (tmp_path / "in.txt").open() as file:
        monkeypatch.setattr("sys.stdin", file)
        assert main(["translate", str(imported.path), "--beam-size", "1"]) == 0
    assert capfdbinary.readouterr().out.decode().split("\n") == [*expected, ""]
    files = [tmp_path / name for name in ("test.en", "test.de")]
    for file, lines in zip(files, (LINES, expected), strict=True):
        file.write_text("".join(f"{line or 'x'}\n" for line in lines), "utf-8")
    arguments = ["evaluate", str(imported.path), "--on", *map(str, files), "--beam-size", "1"]
    assert main([*arguments, "--json"]) == 0
    assert json.loads(capfdbinary.readouterr().out)["sentences"] == len(LINES)


@pytest.mark.exhaustive
def test_an_imported_run_can_be_fine_tuned(
    imported: Imported, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for side, lines in zip(("en", "de"), zip(*PAIRS[:8], strict=True), strict=True):
        (tmp_path / f"x.{side}").write_text("".join(f"{x}\n" for x in lines), "utf-8")
    files = (str(tmp_path / "x.en"), str(tmp_path / "x.de"))
    config = imported.run.config.change(
        data={"train": files, "dev": files, "test": files, "max_length": 64, "batch_tokens": 512},
        train={"steps": 1, "checkpoint_every": 1, "bleu_every": 9, "warmup_steps": 1},
    )
    fine, init = tmp_path / "fine", ["--init-from", str(imported.path)]
    (tmp_path / "fine.json").write_text(json.dumps(config.to_dict()))
    assert main(["train", str(tmp_path / "fine.json"), *init, "--out", str(fine)]) == 0
    trained = load(fine)
    assert [t.digest for t in trained.vocabulary] == [t.digest for t in imported.run.vocabulary]
    assert trained.step == 1
    differences = jax.tree.map(lambda x, y: np.any(x != y), trained.params, imported.run.params)
    assert any(jax.tree.leaves(differences))
    other = config.change(model={"activation": "relu"})
    (tmp_path / "other.json").write_text(json.dumps(other.to_dict()))
    out = str(tmp_path / "other")
    assert main(["train", str(tmp_path / "other.json"), *init, "--out", out]) == 2
    assert "were trained with model.activation swish, not relu" in capsys.readouterr().err
