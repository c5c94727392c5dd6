"""Train a run in a bucket, kill it, resume it on another machine, and use it on a third one."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from bucket_servers import BucketServer, serve_bucket

SIZES = (
    *("--model.d-model", "16", "--model.num-layers", "1", "--model.num-heads", "2"),
    *("--model.d-ff", "16", "--data.batch-tokens", "256", "--data.max-batch-shapes", "1"),
    *("--train.steps", "20", "--train.checkpoint-every", "10", "--train.bleu-every", "1000"),
)


def start(
    server: BucketServer,
    cache: Path,
    *arguments: str,
    words: Sequence[str] = (),
    text: str = "",
    cwd: Path | None = None,
    **variables: str,
) -> subprocess.Popen[str]:
    """Start `transformer-jax` or another command on a machine with the given cache."""
    environment = {
        **os.environ,
        **server.environment,
        "TRANSFORMER_JAX_CACHE": str(cache),
        "TRANSFORMER_JAX_LEASE_SECONDS": "4",
        "TRANSFORMER_JAX_RETRY_SECONDS": "2",
        **variables,
    }
    command = words or [sys.executable, "-m", "transformer_jax", *arguments]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = subprocess.Popen(
        command, env=environment, cwd=cwd, text=True, start_new_session=True, **pipes
    )
    assert process.stdin is not None
    process.stdin.write(text)
    process.stdin.close()
    return process


def run(server: BucketServer, cache: Path, *words: str, code: int = 0, **options: Any) -> str:
    """Run a command on a machine with the given cache, and return its output."""
    with start(server, cache, *words, **options) as process:
        assert process.stdout is not None
        output = process.stdout.read()
    assert process.returncode == code, output
    return output


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["s3", pytest.param("gs", marks=pytest.mark.exhaustive)])
def test_a_killed_run_is_resumed_on_another_machine_with_more_devices_and_used_on_a_third(
    scheme: str, tmp_path: Path
) -> None:
    first, second, third = (tmp_path / x for x in ("first", "second", "third"))
    with serve_bucket(scheme) as server:
        url = server.url("runs/demo")
        train = ("train", "tiny", "--out", url, *SIZES)
        with start(server, first, *train, "--train.steps", "100000") as process:
            while not any("SHA256SUMS" in x for x in server.weather.writes):
                assert process.poll() is None
                time.sleep(0.1)
            process.send_signal(signal.SIGKILL)
        devices = "--xla_force_host_platform_device_count=2"
        resume = ("resume", url, "--train.steps", "100000")
        with start(server, second, *resume, XLA_FLAGS=devices) as process:
            before = len(server.weather.writes)
            while not any("SHA256SUMS" in x for x in server.weather.writes[before:]):
                assert process.poll() is None
                time.sleep(0.1)
            # The first machine detects that another machine is training the run.
            output = run(server, first, "resume", url, code=2)
            assert f"{url} is being trained by process {process.pid} on " in output
            process.send_signal(signal.SIGTERM)
        assert process.returncode == 75
        assert run(server, third, "translate", url, "--beam-size", "1", text="forty-two\n")
        output = run(server, third, "train", "tiny", "--out", url, code=2)
        assert f"{url} already exists: resume it with `transformer-jax resume {url}`" in output
        output = run(server, third, "evaluate", url, "--split", "dev", "--beam-size", "1")
        assert f"stored in {url}/evaluations/dev-" in output
        assert "/remote/" not in output
        output = run(server, first, "report", url, "--out", str(tmp_path / "report"))
        assert "perplexity" in output
        server.weather.is_down = True
        output = run(server, third, "translate", url, code=74)
        assert f"{url} could not be listed: no response for 2 s" in output.splitlines()[-1]


@pytest.mark.exhaustive
@pytest.mark.parametrize("scheme", ["s3", "gs"])
def test_the_jobs_of_manifests_tune_and_train_a_sweep_in_a_bucket_and_survive_a_lost_machine(
    scheme: str, tmp_path: Path
) -> None:
    planner, lost, other = (tmp_path / x for x in ("planner", "lost", "other"))
    launcher = ("--launcher", "kubernetes", "--cluster.image", "image")
    tune = ("--tune", "train.learning_rate_scale", "0.5", "1")
    with serve_bucket(scheme) as server:
        url = server.url("demo")
        plan = ("sweep", "tiny", "--seeds", "1", *SIZES, "--out", url, *launcher, *tune)
        file = tmp_path / "demo.kubernetes.yaml"
        # Notes precede the file.
        _, comment, text = run(server, planner, *plan, "--dry-run", cwd=tmp_path).partition("# k")
        assert yaml.safe_load(comment + text)["kind"] == "JobSet"
        assert not file.exists()
        output = run(server, planner, *plan, cwd=tmp_path)
        assert "runs in demo.kubernetes.yaml: 2" in output
        assert "when the trials have ended, repeat this command to train the rows" in output

        def start_pod(cache: Path, index: int) -> subprocess.Popen[str]:
            content = yaml.safe_load(file.read_text("utf-8"))
            job = content["spec"]["replicatedJobs"][0]["template"]["spec"]
            [container] = job["template"]["spec"]["containers"]
            variables = {x["name"]: x["value"] for x in container["env"]}
            # Both pods run on this machine, which is named "python", but with separate caches.
            variables["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
            words = container["command"]
            # These variables must not make the worker look for other processes of its run.
            variables |= {"JOB_COMPLETION_INDEX": str(index), "KUBERNETES_SERVICE_HOST": "10.0.0.1"}
            return start(server, cache, words=words, cwd=tmp_path, **variables)

        with start_pod(lost, 0) as process:
            while not any("SHA256SUMS" in x for x in server.weather.writes):
                assert process.poll() is None
                time.sleep(0.1)
            os.killpg(process.pid, signal.SIGKILL)
        assert "1 stopped, 2 queued" in run(server, planner, "status", url, cwd=tmp_path)

        def run_pod(index: int) -> None:
            with start_pod(other, index) as process:
                assert process.stdout is not None
                output = process.stdout.read()
            assert process.returncode == 0, output
            assert "resumed" in output or "step 20" in output, output

        # The two trials.
        run_pod(0)
        run_pod(1)
        assert "runs in demo.kubernetes.yaml: 1" in run(server, planner, *plan, cwd=tmp_path)
        run_pod(0)
        assert "3 done" in run(server, planner, "status", url, cwd=tmp_path)
        assert "tiny" in run(server, planner, "report", url, cwd=tmp_path)
        output = run(server, planner, *plan, cwd=tmp_path, code=2)
        assert "there is nothing to start" in output
