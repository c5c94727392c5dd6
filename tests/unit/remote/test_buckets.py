"""Test objects in buckets on a server for S3 and on an emulator of Google Cloud Storage."""

import contextlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from bucket_servers import BucketServer

from transformer_jax.errors import StorageError, UsageError
from transformer_jax.progress import Note
from transformer_jax.remote.buckets import Bucket, PreconditionError


def test_objects_can_be_written_listed_read_and_deleted(
    server: BucketServer, tmp_path: Path
) -> None:
    bucket, file = Bucket(server.url("a")), tmp_path / "file"
    file.write_bytes(b"x" * 1000)
    bucket.write("b/c", b"1")
    bucket.write("d e+f", file)
    Bucket(server.url("ab")).write("other", b"2")
    first = bucket.list()
    assert {name: entry.size for name, entry in first.items()} == {"b/c": 1, "d e+f": 1000}
    assert bucket.read("b/c") == b"1"
    bucket.write("b/c", b"2")
    assert bucket.list()["b/c"].version != first["b/c"].version
    assert bucket.download("d e+f", tmp_path / "x" / "copy")
    assert (tmp_path / "x" / "copy").read_bytes() == b"x" * 1000
    bucket.delete("b/c")
    bucket.delete("b/c")
    assert bucket.read("b/c") is None
    assert not bucket.download("b/c", tmp_path / "none")
    assert list(bucket.list()) == ["d e+f"]


@pytest.mark.parametrize("content", [b"", b"a\r", b"\r\n", b"a\n--==0==\nb", b"--==0==--", b"\x00"])
def test_every_content_is_stored_unchanged(content: bytes, server: BucketServer) -> None:
    bucket = Bucket(server.url("a"))
    bucket.write("x", content)
    assert bucket.read("x") == content


@pytest.mark.parametrize("server", ["s3"], indirect=True)
def test_an_object_that_must_be_new_replaces_no_other(server: BucketServer) -> None:
    bucket = Bucket(server.url("a"))
    bucket.write("x", b"1", is_new=True)
    with pytest.raises(PreconditionError):
        bucket.write("x", b"2", is_new=True)
    assert bucket.read("x") == b"1"


def test_an_object_can_be_downloaded_to_the_same_file_by_several_processes_at_once(
    server: BucketServer, tmp_path: Path
) -> None:
    bucket, path = Bucket(server.url("a")), tmp_path / "copy"
    bucket.write("x", b"1" * 100_000)
    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(lambda _: bucket.download("x", path), range(16)))
    assert path.read_bytes() == b"1" * 100_000
    assert list(tmp_path.iterdir()) == [path]


def test_a_missing_bucket_is_named(server: BucketServer) -> None:
    url = f"{server.scheme}://no-such-bucket/run"
    with pytest.raises(StorageError, match=f"there is no bucket {server.scheme}://no-such-bucket"):
        Bucket(url).list()
    with pytest.raises(StorageError, match=f"there is no bucket {server.scheme}://no-such-bucket"):
        Bucket(url).write("x", b"")


@pytest.mark.parametrize("server", ["s3"], indirect=True)
@pytest.mark.parametrize("name", ["my bucket", "größe"])
def test_an_invalid_name_of_a_bucket_is_reported_at_once(
    server: BucketServer, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRANSFORMER_JAX_RETRY_SECONDS", "600")
    monkeypatch.setattr("time.sleep", lambda _: pytest.fail("the request is repeated"))
    bucket = Bucket(f"s3://{name}/run")
    for request in (bucket.list, lambda: bucket.read("x"), lambda: bucket.write("x", b"")):
        with pytest.raises(StorageError, match=f": {name!r} is not a valid name of a bucket$"):
            request()
    assert server.weather.reads == []


@pytest.mark.parametrize(
    "message", ["Invalid bucket name: 'my bucket'", "The specified bucket is not valid."]
)
def test_a_server_that_rejects_the_name_of_a_bucket_is_not_asked_again(
    message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Google Cloud Storage and S3 respond with these messages, but their test servers do not.
    monkeypatch.setattr("time.sleep", lambda _: pytest.fail("the request is repeated"))

    def request() -> None:
        raise OSError(message)

    with pytest.raises(StorageError, match=r"read: 'my bucket' is not a valid name of a bucket$"):
        Bucket("s3://my bucket/run")._attempt(request, "read")


@pytest.mark.parametrize("server", ["s3"], indirect=True)
def test_missing_credentials_are_reported(
    server: BucketServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(StorageError, match="there are no valid credentials: run `aws configure`"):
        Bucket(server.url("a")).list()


@pytest.mark.parametrize(
    ("forbidden", "verb"),
    [("PUT|POST", "written"), ("DELETE", "changed"), (r"GET .*(list-type|/o\?)", "listed")],
)
def test_a_missing_permission_is_reported(server: BucketServer, forbidden: str, verb: str) -> None:
    bucket = Bucket(server.url("a"))
    bucket.write("x", b"1")
    server.weather.forbidden = forbidden
    request = {
        "written": lambda: bucket.write("x", b"2"),
        "changed": lambda: bucket.delete("x"),
        "listed": bucket.list,
    }[verb]
    problem = f"{server.url('a')} could not be {verb}: permission denied"
    with pytest.raises(StorageError, match=problem) as caught:
        request()
    assert caught.value.exit_code == 74
    assert "\n" not in str(caught.value)
    assert bucket.read("x") == b"1"


@pytest.mark.parametrize("server", ["s3"], indirect=True)
def test_requests_are_repeated_until_the_network_returns(
    server: BucketServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = Bucket(server.url("a"))
    bucket.write("x", b"1")
    server.weather.is_down = True
    with pytest.raises(StorageError, match="could not be read: no response for 0 s"):
        bucket.read("x")
    monkeypatch.setenv("TRANSFORMER_JAX_RETRY_SECONDS", "60")

    def return_after_an_attempt() -> None:
        before = len(server.weather.reads)
        # The HTTP client itself may repeat a request once.
        while len(server.weather.reads) < before + 5:
            time.sleep(0.01)
        server.weather.is_down = False

    thread = threading.Thread(target=return_after_an_attempt)
    thread.start()
    with pytest.warns(Note, match=r"is not responding \(.*\): retrying for 60 s"):
        assert bucket.read("x") == b"1"
    thread.join()


@pytest.mark.parametrize("value", ["2m", "0", "-1", "inf", "nan"])
def test_the_seconds_of_retries_must_be_a_positive_number(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRANSFORMER_JAX_RETRY_SECONDS", value)
    message = f"^TRANSFORMER_JAX_RETRY_SECONDS must be a positive number of seconds.*{value!r}$"
    with pytest.raises(UsageError, match=message):
        Bucket("s3://bucket/run").list()


def test_damaged_responses_are_requested_again(server: BucketServer, tmp_path: Path) -> None:
    bucket, content = Bucket(server.url("a")), bytes(range(256)) * 20
    bucket.write("x", content)
    server.weather.corrupt = 0.3
    for number in range(5):
        with contextlib.suppress(StorageError):
            bucket.download("x", tmp_path / f"{number}")
            assert (tmp_path / f"{number}").read_bytes() == content
    server.weather.corrupt = 1.0
    with pytest.raises(StorageError):
        bucket.download("x", tmp_path / "damaged")
    assert not (tmp_path / "damaged").exists()
