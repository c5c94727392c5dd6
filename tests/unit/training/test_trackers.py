"""Test TensorBoard, and the real clients of other trackers without their servers.

Each client runs in a separate process, because clients issue warnings and start threads.
"""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from example_configs import SMALL
from processes import run_python

from transformer_jax.training.tracking import RunTrackers

# A run in a sweep is killed after step 4 and resumes at step 2.
SESSIONS = """
import sys
from pathlib import Path
from transformer_jax import Config
from transformer_jax.training.tracking import RunTrackers

run = Path("heads/base/seed-0")
run.mkdir(parents=True)
Path("heads/sweep.json").touch()
config = Config().change(train={"trackers": (sys.argv[1],)})
first = [
    {"step": 2, "split": "train", "time": 2.0, "loss": 3.0},
    {"step": 4, "split": "train", "time": 4.0, "loss": 2.0},
    {"step": 4, "split": "dev", "time": 5.0, "perplexity": 9.0},
]
last = {"step": 6, "split": "train", "time": 6.0, "loss": 1.0}
for step, earlier, lines in ((0, [], first), (2, first[:1], [*first[1:], last])):
    trackers = RunTrackers(run, config, step=step, earlier=earlier)
    for line in lines:
        trackers.log(line)
    trackers.log_samples(4, "one < two")
    trackers.finish(is_complete=step == 2)
"""
READ_WANDB = """
import json, struct
from pathlib import Path
from wandb.proto.wandb_internal_pb2 import Record

found = {"runs": [], "points": [], "exits": []}
for path in sorted(Path("wandb").glob("offline-run*/*.wandb")):
    content, start, record = path.read_bytes(), 7, b""
    while start < len(content):
        # A log consists of blocks, and a record can be in several blocks (LevelDB's format).
        left = 32768 - start % 32768
        if left < 7:
            start += left
            continue
        _, length, kind = struct.unpack("<IHB", content[start : start + 7])
        record += content[start + 7 : start + 7 + length]
        start += 7 + length
        if kind in (1, 4):
            parsed, record = Record.FromString(record), b""
            if parsed.HasField("run") and parsed.run.display_name:
                run = parsed.run
                config = {x.key: json.loads(x.value_json) for x in run.config.update}
                model = config.get("model", {}).get("d_model")
                found["runs"].append([run.run_id, run.display_name, run.run_group, model])
            if parsed.HasField("history"):
                items = {
                    x.key or ".".join(x.nested_key): json.loads(x.value_json)
                    for x in parsed.history.item
                }
                for name in ("train/loss", "dev/perplexity"):
                    if name in items:
                        found["points"].append([name, items["step"], items[name]])
            if parsed.HasField("exit"):
                found["exits"].append(parsed.exit.exit_code)
print(json.dumps(found))
"""
READ_MLFLOW = """
import json
from mlflow import MlflowClient

client = MlflowClient()
[experiment] = [x for x in client.search_experiments() if x.name == "heads"]
[run] = client.search_runs([experiment.experiment_id])
points = [
    [name, x.step, x.value]
    for name in ("train/loss", "dev/perplexity")
    for x in client.get_metric_history(run.info.run_id, name)
]
[sample] = client.list_artifacts(run.info.run_id, "samples")
print(json.dumps({
    "points": points, "name": run.info.run_name, "status": run.info.status,
    "d_model": run.data.params["model.d_model"], "sample": sample.path,
}))
"""
READ_AIM = """
import json
import aim

repo = aim.Repo(".")
[key] = repo.list_all_runs()
run = aim.Run(key, repo=repo, system_tracking_interval=None, capture_terminal_logs=False)
points = []
for name, subset in (("loss", "train"), ("perplexity", "dev")):
    metric = run.get_metric(name, aim.sdk.run.Context({"subset": subset}))
    steps, (values, *_) = metric.data.items_list() if hasattr(metric.data, "items_list") else 0
    points += [[f"{subset}/{name}", step, value] for step, value in zip(steps, values)]
print(json.dumps({
    "points": points, "name": run.name, "experiment": run.experiment,
    "d_model": run["config", "model", "d_model"],
}))
"""
POINTS = [
    ["dev/perplexity", 4, 9.0],
    ["train/loss", 2, 3.0],
    ["train/loss", 4, 2.0],
    ["train/loss", 6, 1.0],
]


def sessions(client: str, reader: str, folder: Path) -> dict[str, Any]:
    """Train two sessions with a client, and return what the client stored."""
    if importlib.util.find_spec(client) is None:
        pytest.skip(f"{client} is not installed")
    environment = {
        "WANDB_MODE": "offline",
        "MLFLOW_TRACKING_URI": str(folder / "mlruns"),
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "PYTHONPATH": str(Path(__file__).parents[3]),
    }
    for code in (SESSIONS, reader):
        process = run_python(code, client, cwd=folder, **environment)
        assert process.returncode == 0, process.stderr
        assert "stopped" not in process.stderr
    return json.loads(process.stdout.splitlines()[-1])


@pytest.mark.slow
def test_weights_and_biases_continues_one_run_offline(tmp_path: Path) -> None:
    found = sessions("wandb", READ_WANDB, tmp_path)
    names = [run[1:] for run in found["runs"]]
    assert names == [["base/seed-0", "heads", 512]] * 2
    assert len({run[0] for run in found["runs"]}) == 1
    assert sorted(found["points"]) == POINTS
    # The first session did not complete.
    assert found["exits"] == [1, 0]


@pytest.mark.slow
def test_mlflow_continues_one_run_in_a_local_folder(tmp_path: Path) -> None:
    found = sessions("mlflow", READ_MLFLOW, tmp_path)
    assert sorted(found.pop("points")) == POINTS
    assert found == {
        "name": "base/seed-0",
        "status": "FINISHED",
        "d_model": "512",
        "sample": "samples/step-4.txt",
    }


@pytest.mark.slow
def test_aim_continues_one_run_in_a_local_repository(tmp_path: Path) -> None:
    found = sessions("aim", READ_AIM, tmp_path)
    assert sorted(found.pop("points")) == POINTS
    assert found == {"name": "base/seed-0", "experiment": "heads", "d_model": 512}


def test_tensorboard_shows_hyperparameters_and_samples(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.metadata import parse_session_start_info_plugin_data

    trackers = RunTrackers(tmp_path, SMALL, step=0, earlier=[])
    trackers.log_samples(4, "one\n  = eins\n")
    trackers.finish(is_complete=True)
    events: Any = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"tensors": 0})
    events.Reload()
    [sample] = events.Tensors("samples")
    assert sample.step == 4
    assert sample.tensor_proto.string_val[0].decode() == "    one\n      = eins"
    metadata = events.SummaryMetadata("_hparams_/session_start_info")
    stored = parse_session_start_info_plugin_data(metadata.plugin_data.content).hparams
    assert stored["model.d_model"].number_value == SMALL.model.d_model
    assert stored["model.num_decoder_layers"].string_value == "None"
    assert stored["train.trackers"].string_value == "['tensorboard']"
    assert {len(str(key).split(".")) for key in stored} == {2}
