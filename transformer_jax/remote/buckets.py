"""Objects in a bucket of Google Cloud Storage or S3, with the fsspec libraries gcsfs and s3fs.

A write replaces a whole object atomically. Each object that this module writes stores the SHA-256
of its contents. Each download compares the contents with this digest, and a damaged response is
requested again. If a server does not respond, requests are retried for `RETRY_VARIABLE` seconds.
"""

import contextlib
import functools
import hashlib
import logging
import math
import os
import random
import re
import secrets
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from transformer_jax.errors import StorageError, UsageError, summarize_error
from transformer_jax.files import JsonObject
from transformer_jax.optional import import_optional
from transformer_jax.progress import note

RETRY_VARIABLE = "TRANSFORMER_JAX_RETRY_SECONDS"
DEFAULT_RETRY_SECONDS = 150.0
# The first pause and the longest pause between two attempts, in seconds.
PAUSES = 0.5, 15.0
# The number of attempts to read an object whose contents do not match its digest.
MAX_READS = 4
# gcsfs uploads larger objects in chunks.
MULTIPART_BYTES = 5 << 20
DIGEST = "sha256"
# This pattern matches error messages from botocore, Google Cloud Storage, and S3.
INVALID_NAME = re.compile("invalid bucket name|specified bucket is not valid", re.IGNORECASE)
LIBRARIES = ("gcsfs", "s3fs", "botocore", "aiobotocore", "asyncio")
T = TypeVar("T")


def read_seconds(variable: str, default: float) -> float:
    """Return the positive number of seconds in an environment variable, or the default."""
    value = os.environ.get(variable) or default
    with contextlib.suppress(ValueError):
        if 0 < (seconds := float(value)) < math.inf:
            return seconds
    raise UsageError(
        f"{variable} must be a positive number of seconds, such as {default:.0f}, got {value!r}"
    )


class PreconditionError(Exception):
    """An object that must be new already exists."""


@dataclass(frozen=True)
class Entry:
    """An object in a listing."""

    size: int
    version: str
    """A string that changes whenever the contents change."""


class Bucket:
    """The objects whose names start with a prefix, such as those of the run gs://bucket/run."""

    def __init__(self, url: str) -> None:
        """Store the URL without sending a request."""
        self.url = url.rstrip("/")
        self._scheme, _, self._root = self.url.partition("://")
        self._bucket = self._root.partition("/")[0]
        variables = ("STORAGE_EMULATOR_HOST", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3")
        servers = tuple(map(os.environ.get, variables))
        self._files: Any = _open_file_system(self._scheme, servers)

    def list(self) -> dict[str, Entry]:
        """Return all objects, keyed by their names without the prefix.

        Raises:
            StorageError: see `_attempt`.
        """
        prefix = f"{self._root}/"

        def find() -> dict[str, Entry]:
            self._files.invalidate_cache()
            found: dict[str, Any] = {}
            with contextlib.suppress(FileNotFoundError):
                found = self._files.find(prefix, detail=True)
            if not found:
                self._check_exists()
            return {
                name.removeprefix(prefix): Entry(
                    int(info["size"]),
                    str(info.get("generation") or info.get("ETag") or info.get("etag")),
                )
                for name, info in found.items()
                if name.startswith(prefix) and info.get("type") == "file"
            }

        return self._attempt(find, "listed")

    def read(self, name: str) -> bytes | None:
        """Return the contents of a small object, or None if there is no such object.

        Raises:
            StorageError: see `download`.
        """
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "object"
            return path.read_bytes() if self.download(name, path) else None

    def download(self, name: str, path: Path, *, keeps_damaged: bool = False) -> bool:
        """Write an object to a file, and return whether the object exists.

        Raises:
            StorageError: `keeps_damaged` is false, and the contents still do not match the digest
                after `MAX_READS` attempts.
        """
        # Other processes may download the same object to the same folder.
        temporary = path.with_name(f".{path.name}-{secrets.token_hex(4)}.download")
        path.parent.mkdir(parents=True, exist_ok=True)

        def download() -> bool:
            for attempt in range(MAX_READS):
                try:
                    expected = self._read_digest(name)
                    self._files.get_file(self._path(name), str(temporary))
                except FileNotFoundError:
                    return False
                with temporary.open("rb") as file:
                    digest = hashlib.file_digest(file, "sha256").hexdigest()
                is_last = attempt == MAX_READS - 1
                if expected in (None, digest) or (is_last and keeps_damaged):
                    temporary.replace(path)
                    return True
                time.sleep(attempt * PAUSES[0])
            raise StorageError(f"{self.url}/{name} does not match its stored digest")

        try:
            return self._attempt(download, "read")
        finally:
            temporary.unlink(missing_ok=True)

    def write(self, name: str, content: bytes | Path, *, is_new: bool = False) -> None:
        """Create or replace an object.

        Raises:
            PreconditionError: `is_new` is true, and the object exists.
        """
        if isinstance(content, Path):
            with content.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        else:
            digest = hashlib.sha256(content).hexdigest()
        metadata = {DIGEST: digest}
        options: dict[str, Any] = {"mode": "create" if is_new else "overwrite"}
        options["metadata" if self._scheme == "gs" else "Metadata"] = metadata

        def write() -> None:
            if self._scheme == "gs" and _breaks_multipart(content):
                self._upload_in_chunks(name, content, options)
            elif isinstance(content, Path):
                self._files.put_file(str(content), self._path(name), **options)
            else:
                self._files.pipe_file(self._path(name), content, **options)

        self._attempt(write, "written")

    def delete(self, name: str) -> None:
        """Delete an object. If it does not exist, do nothing."""

        def delete() -> None:
            try:
                self._files.rm_file(self._path(name))
            except FileNotFoundError:
                return

        self._attempt(delete, "changed")

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _read_digest(self, name: str) -> str | None:
        if self._scheme == "s3":
            return self._files.metadata(self._path(name), refresh=True).get(DIGEST)
        # The method `info` would also list the objects whose names begin with this name.
        synchronize = import_optional("fsspec.asyn").sync
        found = synchronize(self._files.loop, self._files._get_object, self._path(name))
        return found.get("metadata", {}).get(DIGEST)

    def _upload_in_chunks(self, name: str, content: bytes | Path, options: JsonObject) -> None:
        """Create or replace an object with a resumable upload, in one chunk."""
        core, run = import_optional("gcsfs.core"), import_optional("fsspec.asyn").sync
        data = content if isinstance(content, bytes) else content.read_bytes()
        kind = "application/octet-stream"
        start = core.initiate_upload
        arguments = self._files, self._bucket, self._path(name).partition("/")[2], kind
        place = run(self._files.loop, start, *arguments, **options)
        run(self._files.loop, core.upload_chunk, self._files, place, data, 0, len(data), kind)

    def _check_exists(self) -> None:
        """Raise a StorageError if the bucket does not exist."""
        try:
            self._files.info(self._bucket)
        except FileNotFoundError:
            raise StorageError(
                f"there is no bucket {self._scheme}://{self._bucket}: create it, or check the name"
            ) from None

    def _attempt(self, request: Callable[[], T], verb: str) -> T:
        """Retry a request until the server responds, and return the result.

        Raises:
            StorageError: the server does not respond for `RETRY_VARIABLE` seconds, or there are no
                credentials, no bucket, or no permission.
            PreconditionError: the object already exists.
            UsageError: the value of `RETRY_VARIABLE` is not valid.
        """
        seconds = read_seconds(RETRY_VARIABLE, DEFAULT_RETRY_SECONDS)
        deadline, pause, is_noted = time.monotonic() + seconds, PAUSES[0], False
        while True:
            try:
                return request()
            except StorageError:
                raise
            # The libraries and their dependencies raise many undocumented types of exceptions.
            except Exception as error:
                self._raise_permanent(error, verb)
                if time.monotonic() + pause > deadline:
                    reason = summarize_error(error)
                    raise StorageError(
                        f"{self.url} could not be {verb}: no response for {seconds:.0f} s "
                        f"({reason}); check the network"
                    ) from error
                if not is_noted:
                    is_noted = True
                    note(
                        f"{self.url} is not responding ({summarize_error(error)}): retrying for "
                        f"{seconds:.0f} s"
                    )
            time.sleep(pause * random.uniform(0.5, 1))  # noqa: S311 (no cryptography)
            pause = min(2 * pause, PAUSES[1])

    def _raise_permanent(self, error: Exception, verb: str) -> None:
        """Raise an error if retrying cannot help."""
        kind, code = type(error).__name__, str(getattr(error, "code", ""))
        problem = f"{self.url} could not be {verb}: "
        if isinstance(error, FileExistsError):
            raise PreconditionError from error
        if INVALID_NAME.search(str(error)):
            reason = f"{self._bucket!r} is not a valid name of a bucket"
            raise StorageError(f"{problem}{reason}") from error
        if "Credential" in kind or "RefreshError" in kind or code == "401":
            login = "gcloud auth application-default login"
            how = f"run `{login}`" if self._scheme == "gs" else "run `aws configure`"
            raise StorageError(f"{problem}there are no valid credentials: {how}") from error
        is_forbidden = str(error).startswith("Forbidden") or code == "403"
        if isinstance(error, PermissionError) or is_forbidden:
            reason = summarize_error(error)
            raise StorageError(f"{problem}permission denied ({reason})") from error
        if isinstance(error, FileNotFoundError):
            raise StorageError(
                f"{problem}there is no bucket {self._scheme}://{self._bucket}"
            ) from error
        if isinstance(error, OSError) and error.filename and Path(error.filename).is_absolute():
            raise StorageError(f"{problem}{summarize_error(error)}") from error


@functools.cache
def _open_file_system(scheme: str, _servers: tuple[str | None, ...]) -> object:
    """Return the client for a scheme. `_servers` is only part of the cache key."""
    # These libraries also log the errors that `Bucket` reports.
    for library in LIBRARIES:
        logging.getLogger(library).setLevel(logging.CRITICAL)
    feature = f"a folder at {scheme}://"
    if scheme == "gs":
        # By default, `gcsfs` selects a class that requests each bucket's type over gRPC.
        core = import_optional("gcsfs.core", feature)
        options: dict[str, object] = {"skip_instance_cache": True}
        if os.environ.get("STORAGE_EMULATOR_HOST"):
            options["token"] = "anon"  # noqa: S105 (an emulator has no accounts)
        return core.GCSFileSystem(use_listings_cache=False, timeout=60, **options)
    s3fs = import_optional("s3fs", feature)
    config = {"connect_timeout": 10, "read_timeout": 60, "retries": {"max_attempts": 0}}
    files = s3fs.S3FileSystem(
        use_listings_cache=False, skip_instance_cache=True, config_kwargs=config
    )
    # `Bucket` retries requests itself and prints a note.
    files.retries = 1
    return files


def _breaks_multipart(content: bytes | Path) -> bool:
    """Return whether a server could misread the object in a multipart upload by gcsfs.

    gcsfs writes a line feed and a fixed boundary after the object. If the object ends with a
    carriage return, the server can mistake this character for a part of the separator.
    """
    if isinstance(content, Path):
        if content.stat().st_size >= MULTIPART_BYTES:
            return False
        content = content.read_bytes()
    return content.endswith(b"\r") or b"--==0==" in content
