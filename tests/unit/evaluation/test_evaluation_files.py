import csv
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from bucket_servers import BucketServer
from example_configs import SMALL

from transformer_jax.analysis.significance import save_comparison
from transformer_jax.config import Config
from transformer_jax.data.tokenizer import Tokenizer, Vocabulary
from transformer_jax.errors import StorageError
from transformer_jax.evaluation import evaluation_files
from transformer_jax.evaluation.evaluate import Evaluation
from transformer_jax.evaluation.evaluation_files import (
    folder_name,
    read_translations,
    save_evaluation,
)
from transformer_jax.evaluation.perplexity import SentenceScore
from transformer_jax.evaluation.scores import score
from transformer_jax.files import JsonObject, read_json_if_valid
from transformer_jax.inference.history import stored_evaluations
from transformer_jax.inference.trained_run import Run
from transformer_jax.model.build import build_transformer
from transformer_jax.model.inspect import abstract_params
from transformer_jax.progress import Note
from transformer_jax.remote.copies import local_path
from transformer_jax.runs.run_folder import RunFolder

DECODE = Config().to_dict()["decode"]
SOURCES, REFERENCES = ["one", "two"], ["eins", "zwei"]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    vocabulary = Vocabulary.share(Tokenizer.train(["one two three", "eins zwei drei"], 24))
    config = replace(SMALL, decode=Config().decode)
    model = build_transformer(config.model, **vocabulary.sizes)
    params = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), abstract_params(model))
    return Run(RunFolder(tmp_path, config, vocabulary, ""), params, steps=(8,))


def evaluation_of(hypotheses: list[str], *, step: int = 8, average: int = 1) -> Evaluation:
    result = {
        "split": "dev",
        "step": step,
        "average_checkpoints": average,
        "decode": {**DECODE, "beam_size": 1},
    }
    sentences = [SentenceScore(1, 2, 0.1), SentenceScore(3, 4, 1 / 3)]
    scores = score(hypotheses, REFERENCES)
    return Evaluation(result, SOURCES, hypotheses, REFERENCES, scores, sentences)


@pytest.mark.parametrize("server", ["s3"], indirect=True)
def test_an_evaluation_and_a_comparison_survive_a_refresh_of_the_copy_of_a_bucket(
    run: Run, server: BucketServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = server.url("run")
    remote = replace(run, folder=replace(run.folder, path=local_path(url)))
    write_json = evaluation_files.write_json
    refreshes = list[Future[Path]]()

    def write_and_refresh(path: Path, content: JsonObject) -> None:
        # Another command, such as `status`, refreshes the copy before the files are uploaded.
        refreshes.append(pool.submit(local_path, url))
        wait(refreshes, 0.2)
        write_json(path, content)

    monkeypatch.setattr(evaluation_files, "write_json", write_and_refresh)
    with ThreadPoolExecutor(1) as pool:
        folder = save_evaluation(remote, evaluation_of(REFERENCES))
        [refresh] = refreshes
        refresh.result()
    save_comparison(folder, {"run": "base"}, REFERENCES)
    local_path(url)
    names = sorted(path.name.partition("-")[0] for path in folder.iterdir())
    texts = ["hypothesis.txt", "reference.txt", "scores.json", "sentences.csv", "source.txt"]
    assert names == ["baseline", "baseline", *texts]


def test_new_translations_in_a_bucket_delete_the_comparisons_of_the_old_ones(
    run: Run, server: BucketServer
) -> None:
    url = server.url("run")
    remote = replace(run, folder=replace(run.folder, path=local_path(url)))
    folder = save_evaluation(remote, evaluation_of(REFERENCES))
    save_comparison(folder, {"run": "base"}, REFERENCES)
    save_evaluation(remote, evaluation_of(REFERENCES))
    local_path(url)
    assert len(list(folder.glob("baseline-*.json"))) == 1
    save_evaluation(remote, evaluation_of(SOURCES))
    local_path(url)
    assert list(folder.glob("baseline-*.json")) == []
    assert read_translations(folder) == (SOURCES, REFERENCES)


def test_lines_and_scores_can_be_read_back(run: Run) -> None:
    evaluation = evaluation_of(["eins", "größe\u2028x"])
    folder = save_evaluation(run, evaluation)
    lines = {
        name: (folder / f"{name}.txt").read_text("utf-8").split("\n")[:-1]
        for name in ("source", "hypothesis", "reference")
    }
    assert list(lines.values()) == [SOURCES, evaluation.hypotheses, REFERENCES]
    scores = read_json_if_valid(folder / "scores.json")
    files = {"source.txt", "hypothesis.txt", "reference.txt", "sentences.csv"}
    assert scores.pop("files").keys() == files
    assert scores == evaluation.result
    with (folder / "sentences.csv").open() as file:
        head, *rows = csv.reader(file)
    assert head == ["source_tokens", "target_tokens", "nll"]
    assert [SentenceScore(int(s), int(t), float(nll)) for s, t, nll in rows] == evaluation.sentences


def test_each_checkpoint_of_a_mean_has_its_own_folder(run: Run) -> None:
    singles = tuple(evaluation_of(REFERENCES, step=step) for step in (4, 8))
    mean = evaluation_of(SOURCES, average=2)._replace(per_checkpoint=singles)
    parent = save_evaluation(run, mean).parent
    assert {folder.name for folder in parent.iterdir()} == {
        "dev-step8-average2-beam1-alpha0.6",
        "dev-step4-average1-beam1-alpha0.6",
        "dev-step8-average1-beam1-alpha0.6",
    }
    scores = read_json_if_valid(parent / "dev-step4-average1-beam1-alpha0.6/scores.json")
    assert singles[0].result.items() <= scores.items()


def test_each_way_of_translating_has_its_own_folder() -> None:
    changes: list[dict[str, Any]] = [
        {},
        {"length_penalty_alpha": 1.0},
        {"length_penalty_alpha": 0.60000001},
        {"beam_end": "any"},
        {"length_penalty": "power"},
        {"max_extra_length": 20},
        {"beam_size": 2},
    ]
    result = evaluation_of(REFERENCES).result
    names = [folder_name({**result, "decode": result["decode"] | new}) for new in changes]
    assert len(set(names)) == len(changes)
    assert "dev-step8-average1-beam1-alpha0.6-length-penalty-power" in names


def test_scores_are_never_read_with_other_translations(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_evaluation(run, evaluation_of(REFERENCES))
    (folder / "baseline-other.json").touch()
    save_evaluation(run, evaluation_of(REFERENCES))
    # The translations have not changed, so no file is deleted.
    assert (folder / "baseline-other.json").exists()

    def no_space(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(evaluation_files, "write_json", no_space)
    with pytest.raises(StorageError, match="no space left"):
        save_evaluation(run, evaluation_of(SOURCES))
    # Another command may look for the scores at this moment, so they still exist.
    assert [path.name for path in folder.glob("*.json")] == ["scores.json"]
    with pytest.raises(StorageError, match="has changed since it was written: evaluate again"):
        read_translations(folder)
    with pytest.warns(Note, match=r"\.txt has changed since it was written: evaluate again"):
        assert stored_evaluations(run.folder) == []


def test_damage_to_translations_or_scores_is_noticed(run: Run) -> None:
    folder = save_evaluation(run, evaluation_of(REFERENCES))
    for name in ("hypothesis.txt", "reference.txt"):
        intact = (folder / name).read_bytes()
        (folder / name).write_bytes(bytes([intact[0] ^ 1]) + intact[1:])
        with pytest.raises(StorageError, match=rf"{name} has changed since it was written"):
            read_translations(folder)
        (folder / name).write_bytes(intact)
    (folder / "notes.txt").symlink_to("missing")
    assert len(stored_evaluations(run.folder)) == 1
    scores = (folder / "scores.json").read_text()
    (folder / "scores.json").write_text(scores.replace('"step": 8', '"step": 9'))
    with pytest.warns(Note, match="scores.json differs from what was written"):
        assert read_json_if_valid(folder / "scores.json") == {}
