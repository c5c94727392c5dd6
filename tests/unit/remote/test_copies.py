"""Test local copies of runs in buckets: uploads in order, downloads on demand, and damage."""

import contextlib
from pathlib import Path

import pytest
from bucket_servers import BucketServer
from run_files import IDENTITY, first_value, open_writable, write_steps

from transformer_jax.cache import cache_folder
from transformer_jax.errors import StorageError, UsageError
from transformer_jax.progress import Note
from transformer_jax.remote.buckets import Bucket
from transformer_jax.remote.copies import fetch, find_url, local_path, publish, uploading
from transformer_jax.remote.session import _sessions, is_training, training
from transformer_jax.runs.checkpoint_manager import CheckpointManager


@pytest.mark.parametrize("url", ["gs:", "gs://", "s3:/", "s3:///"])
def test_a_url_without_a_bucket_is_rejected(url: str) -> None:
    with pytest.raises(
        UsageError, match=f"{url} does not name a bucket: use a URL such as {url[:2]}://"
    ):
        local_path(url)


def write_run(path: Path, steps: dict[int, float | None], keep: int = 3) -> None:
    """Simulate the training of a run: write a report and a checkpoint for each step."""
    with training(path):
        path.mkdir(parents=True, exist_ok=True)
        (path / "run.json").write_text("{}")
        for step, perplexity in steps.items():
            with (path / "metrics.jsonl").open("a") as metrics:
                metrics.write(f"{step}\n")
            write_steps(path / "checkpoints", {step: perplexity}, keep)


def move(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    """Continue on another machine, which has a different cache."""
    monkeypatch.setenv("TRANSFORMER_JAX_CACHE", str(cache))


def value_of(path: Path, step: int) -> float:
    """Return the first value in a run's checkpoint, or raise a StorageError."""
    with CheckpointManager(path / "checkpoints", IDENTITY) as checkpoints:
        return first_value(checkpoints, step)


def test_another_machine_sees_the_run_and_downloads_only_the_arrays_that_it_reads(
    server: BucketServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    url = server.url("sweeps/run")
    write_run(local_path(url), {4: 9.0, 8: 8.0})
    move(monkeypatch, tmp_path / "other")
    # Reading needs no permission to write.
    server.weather.forbidden = "PUT|POST|DELETE"
    path = local_path(url)
    assert find_url(path) == url
    assert (path / "metrics.jsonl").read_text() == "4\n8\n"
    assert not list(path.glob("checkpoints/*/params"))
    assert value_of(path, 8) == 8
    assert [x.parent.name for x in path.glob("checkpoints/*/params")] == ["8"]
    before = len(server.weather.reads)
    assert value_of(local_path(url), 8) == 8
    assert not any("params" in x for x in server.weather.reads[before:] if "list-type" not in x)
    with pytest.raises(StorageError, match="written: permission denied"), training(path):
        pytest.fail("the run is not trained")


def test_a_run_continues_on_another_machine_without_copying_older_arrays(
    server: BucketServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    url = server.url("run")
    write_run(local_path(url), {4: 9.0, 8: 8.0})
    move(monkeypatch, tmp_path / "other")
    path, before = local_path(url), len(server.weather.writes)
    write_run(path, {12: 7.0, 16: 6.0})
    written = [x for x in server.weather.writes[before:] if "DELETE" not in x]
    assert not any("checkpoints/8/" in x or "checkpoints%2F8%2F" in x for x in written)
    move(monkeypatch, tmp_path / "third")
    path = local_path(url)
    assert [value_of(path, step) for step in (8, 12, 16)] == [8, 12, 16]
    assert (path / "metrics.jsonl").read_text() == "4\n8\n12\n16\n"
    # Four checkpoints were written, and three are kept.
    assert not any(name.startswith("checkpoints/4/") for name in Bucket(url).list())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::transformer_jax.progress.Note")
def test_a_run_that_ends_between_any_two_objects_is_intact(
    server: BucketServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    url = server.url("whole")
    write_run(local_path(url), {4: 9.0, 8: 8.0}, keep=1)
    num_writes = len(server.weather.writes)
    for count in range(1, num_writes, 11):
        url = server.url(f"run-{count}")
        move(monkeypatch, tmp_path / f"{count}-first")
        server.weather.allowed_writes, path = count, local_path(url)
        # The number of renewals of the lease varies, so the last runs may end on their own.
        with contextlib.suppress(StorageError):
            write_run(path, {4: 9.0, 8: 8.0}, keep=1)
        assert server.weather.is_down or count > num_writes / 2
        server.weather.allowed_writes, server.weather.is_down = float("inf"), False
        move(monkeypatch, tmp_path / f"{count}-second")
        path = local_path(url)
        if (path / "checkpoints").exists():
            with CheckpointManager(path / "checkpoints", IDENTITY) as checkpoints:
                latest = checkpoints.latest_valid()
                assert latest in (4, 8)
                assert first_value(checkpoints, latest) == latest
                assert checkpoints.damaged_metadata == {}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::transformer_jax.progress.Note")
def test_in_a_bad_network_nothing_is_lost_and_nothing_wrong_is_loaded(
    server: BucketServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    url = server.url("run")
    monkeypatch.setenv("TRANSFORMER_JAX_RETRY_SECONDS", "30")
    monkeypatch.setenv("TRANSFORMER_JAX_LEASE_SECONDS", "600")
    server.weather.drop, server.weather.corrupt = 0.03, 0.03
    write_run(local_path(url), {4: 9.0, 8: 8.0})
    move(monkeypatch, tmp_path / "other")
    path = local_path(url)
    assert (path / "metrics.jsonl").read_text() == "4\n8\n"
    assert [value_of(path, step) for step in (4, 8)] == [4, 8]


def test_a_damaged_object_is_detected_and_the_previous_checkpoint_is_used(
    server: BucketServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    url = server.url("run")
    write_run(local_path(url), {4: 9.0, 8: 8.0})
    bucket = Bucket(url)
    name = next(name for name in bucket.list() if name.startswith("checkpoints/8/params/d/"))
    content = bytearray(bucket.read(name) or b"")
    content[len(content) // 2] ^= 1
    bucket.write(name, bytes(content))
    move(monkeypatch, tmp_path / "other")
    path = local_path(url)
    renamed = "checkpoint 8 is damaged and was renamed to bad-8"
    with (
        training(path),
        open_writable(path / "checkpoints") as checkpoints,
        pytest.warns(Note, match=renamed),
    ):
        assert checkpoints.latest_valid() == 4
    assert any(name.startswith("checkpoints/bad-8/") for name in bucket.list())
    assert not any(name.startswith("checkpoints/8/") for name in bucket.list())


def test_damage_of_the_local_copy_is_repaired(server: BucketServer) -> None:
    url = server.url("run")
    write_run(local_path(url), {8: 8.0})
    path = local_path(url)
    file = next(path.glob("checkpoints/8/params/d/*"))
    file.write_bytes(file.read_bytes()[::-1])
    assert value_of(path, 8) == 8


def test_a_run_that_was_deleted_from_the_bucket_is_gone(server: BucketServer) -> None:
    url = server.url("run")
    write_run(local_path(url), {8: 8.0})
    for name in Bucket(url).list():
        Bucket(url).delete(name)
    assert not local_path(url).exists()


def test_while_a_process_trains_a_run_others_on_the_machine_read_its_files(
    server: BucketServer,
) -> None:
    url = server.url("sweeps/run")
    path = local_path(url)
    assert not is_training(path)
    with training(path):
        assert is_training(path)
        path.mkdir(parents=True)
        (path / "run.json").write_text("{}")
        assert (local_path(url) / "run.json").exists()
        assert (local_path(server.url("sweeps")) / "run" / "run.json").exists()
        with pytest.raises(UsageError, match=f"{url} is being trained"), training(path):
            pass
    assert "run.json" in Bucket(url).list()


@pytest.mark.parametrize("server", ["s3"], indirect=True)
def test_a_trainer_that_lost_its_lease_does_not_upload_reports(server: BucketServer) -> None:
    url = server.url("run")
    path = local_path(url)
    with training(path):
        session = _sessions[path]
        # Wait until no upload is in progress.
        with session._lock:
            Bucket(f"{url}/lease").write("9.json", b"{}")
            path.mkdir(parents=True)
            (path / "metrics.jsonl").write_text("8\n")
        for thread in session._threads:
            thread.join(3.0)
        with pytest.raises(StorageError, match="another process has taken over"):
            session.check()
    assert "metrics.jsonl" not in Bucket(url).list()


@pytest.mark.parametrize("server", ["s3"], indirect=True)
def test_an_evaluation_is_published_with_its_scores_last(
    server: BucketServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    url = server.url("run")
    write_run(local_path(url), {8: 8.0})
    folder = local_path(url) / "evaluations" / "dev"
    folder.mkdir(parents=True)
    for name in ("scores.json", "a.txt", "z.txt"):
        (folder / name).write_text(name)
    publish(folder)
    assert "scores.json" in server.weather.writes[-1]
    # A process that starts training meanwhile does not delete files that are not in the bucket yet.
    with uploading(folder, ["more.txt"]):
        (folder / "more.txt").write_text("more")
        with training(local_path(url)):
            assert (folder / "more.txt").exists()
    move(monkeypatch, tmp_path / "other")
    assert (local_path(url) / "evaluations" / "dev" / "z.txt").read_text() == "z.txt"


def test_other_paths_are_not_remote(tmp_path: Path) -> None:
    assert local_path(tmp_path / "remote" / "x") == tmp_path / "remote" / "x"
    assert find_url(tmp_path / "remote" / "gs" / "x") is None
    assert find_url(cache_folder("remote")) is None
    assert find_url(cache_folder("remote") / "gs") is None
    with training(tmp_path / "x"):
        pass
    publish(tmp_path)
    with pytest.raises(UsageError, match=r"https://x\.org/run is a URL"):
        local_path("https://x.org/run")


def test_files_of_a_sweep_are_uploaded_one_by_one_and_fetched_without_the_others(
    server: BucketServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    url = server.url("sweep")
    # A row can have any name.
    folder, names = local_path(url), ["sweep.json", "lease/seed-0.json"]
    with uploading(folder, names):
        # Meanwhile, other processes on this machine can read the sweep. They do not delete folders
        # and files that are not in the bucket yet.
        (folder / "lease").mkdir(parents=True)
        local_path(url)
        for name in (*names, "lease/seed-0.log"):
            (folder / name).write_text(name)
        local_path(url)
    # A refresh keeps the logs, which are not in the bucket.
    assert sorted(x.name for x in local_path(url).rglob("*.*")) == [
        *("seed-0.json", "seed-0.log", "sweep.json")
    ]
    move(monkeypatch, tmp_path / "other")
    reads = len(server.weather.reads)
    other = fetch(url, ["lease/seed-0.json", "lease/seed-0.state"])
    assert [x.name for x in other.rglob("*.*")] == ["seed-0.json"]
    assert not any("sweep.json" in x for x in server.weather.reads[reads:])
    assert fetch(str(tmp_path), ["absent"]) == tmp_path
