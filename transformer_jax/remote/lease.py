"""A lease that lets only one process train a run, or plan a sweep, in a bucket.

A lease is an object named lease/N.json. Its holder creates it only if it does not exist, and then
renews it regularly. The lease with the largest N is valid. If its holder does not renew it, another
process creates the next lease.
"""

import contextlib
import json
import os
import re
import secrets
import socket
import time
from typing import Self

from transformer_jax.errors import StorageError, UsageError
from transformer_jax.files import JsonObject
from transformer_jax.progress import note
from transformer_jax.remote.buckets import Bucket, PreconditionError, read_seconds

FOLDER = "lease"
# The name of a lease in a folder.
OBJECT = re.compile(rf"(?:.*/)?{FOLDER}/\d+\.json")
SECONDS_VARIABLE = "TRANSFORMER_JAX_LEASE_SECONDS"
DEFAULT_SECONDS = 180.0
# A lease is renewed this many times during the period for which it is valid.
RENEWALS = 12


class Lease:
    """A context manager that holds the lease of a run or sweep. The caller must renew it."""

    def __init__(self, url: str, machine: str, *, waits: bool = False) -> None:
        """Store the arguments, without sending a request.

        Args:
            url: the folder in the bucket.
            machine: the ID of this machine. The caller ensures that no other process on this
                machine uses the folder. Therefore, an existing lease with this ID is from an
                earlier process and has no holder.
            waits: wait for a holder that renews its lease, instead of raising a UsageError.

        Raises:
            UsageError: the value of `SECONDS_VARIABLE` is not valid.
        """
        # The number of seconds for which a lease is valid after a renewal.
        self.seconds = read_seconds(SECONDS_VARIABLE, DEFAULT_SECONDS)
        self._bucket, self._machine, self._waits = Bucket(f"{url}/{FOLDER}"), machine, waits
        self._url, self._token = url, secrets.token_hex(8)
        self._number = 0
        self._renewals = 0

    def __enter__(self) -> Self:
        """Acquire the lease.

        Raises:
            UsageError: another process holds the lease, and this one does not wait.
        """
        while not self._acquire():
            if not self._waits:
                raise UsageError(
                    f"{self._url} is being used by a process that has just started: run the "
                    "command again"
                )
        self._delete_before(self._number)
        return self

    def _acquire(self) -> bool:
        """Create the next lease. Return False if another process created it at the same time."""
        latest = max(self._numbers(), default=0)
        if latest:
            self._wait_for_holder(latest)
        self._number = latest + 1
        # If the response to the first attempt was lost, this process created the existing lease.
        with contextlib.suppress(PreconditionError):
            self._write(is_new=True)
        return self._read(self._number).get("token") == self._token

    def renew(self) -> None:
        """Extend the lease. Raise a StorageError if another process has taken it."""
        if max(self._numbers(), default=self._number) > self._number:
            raise StorageError(
                f"another process has taken over {self._url}, because this one did not renew its "
                f"lease for {self.seconds:.0f} s; the bucket contains only what was uploaded"
            )
        self._renewals += 1
        self._write()

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        """Release the lease. If the bucket cannot be reached, the lease expires instead."""
        try:
            if max(self._numbers(), default=0) == self._number:
                self._write(is_released=True)
        except StorageError:
            if error is None:
                raise

    def _wait_for_holder(self, number: int) -> None:
        """Wait until the holder of a lease has released it or has failed to renew it.

        The clocks of different machines do not agree, so check whether the lease changes.
        """
        first = self._read(number)
        if first.get("released") or first.get("machine") == self._machine or not first:
            return
        holder = f"process {first.get('pid')} on {first.get('host')}"
        note(f"{self._url}: waiting up to {self.seconds:.0f} s to see if {holder} is still active")
        deadline = time.monotonic() + self.seconds
        while time.monotonic() < deadline:
            time.sleep(self.seconds / RENEWALS / 2)
            now = self._read(number)
            if now.get("released") or not now:
                return
            if now != first and not self._waits:
                raise UsageError(f"{self._url} is being trained by {holder}")
            if now != first:
                first, deadline = now, time.monotonic() + self.seconds

    def _numbers(self) -> list[int]:
        stems = (name.removesuffix(".json") for name in self._bucket.list())
        return [int(stem) for stem in stems if stem.isdecimal() and len(stem) < 10]

    def _read(self, number: int) -> JsonObject:
        """Return a lease, or {} if it does not exist or is not valid JSON."""
        with contextlib.suppress(ValueError):
            lease = json.loads(self._bucket.read(f"{number}.json") or b"")
            return lease if isinstance(lease, dict) else {}
        return {}

    def _write(self, *, is_new: bool = False, is_released: bool = False) -> None:
        content = {
            "token": self._token,
            "machine": self._machine,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "renewals": self._renewals,
            "released": is_released,
        }
        self._bucket.write(f"{self._number}.json", json.dumps(content).encode(), is_new=is_new)

    def _delete_before(self, number: int) -> None:
        for old in self._numbers():
            if old < number:
                self._bucket.delete(f"{old}.json")
