"""Test that only one process at a time holds the lease of a run."""

import pytest
from bucket_servers import BucketServer

from transformer_jax.errors import StorageError, UsageError
from transformer_jax.progress import Note
from transformer_jax.remote.lease import Lease


def test_a_lease_that_was_released_can_be_acquired_at_once(server: BucketServer) -> None:
    for machine in ("a", "b", "a"):
        with Lease(server.url("run"), machine) as lease:
            lease.renew()


def test_a_lease_that_is_renewed_cannot_be_acquired(
    server: BucketServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = server.url("run")
    with Lease(url, "a") as lease:
        monkeypatch.setattr("time.sleep", lambda _: lease.renew())
        with (
            pytest.warns(Note, match="waiting up to 1 s"),
            pytest.raises(UsageError, match="is being trained by process"),
        ):
            Lease(url, "b").__enter__()


def test_a_lease_that_is_not_renewed_can_be_acquired_and_then_belongs_to_one(
    server: BucketServer,
) -> None:
    url = server.url("run")
    lost = Lease(url, "a").__enter__()
    with pytest.warns(Note, match="waiting up to 1 s"):
        lease = Lease(url, "b").__enter__()
    with pytest.raises(StorageError, match="another process has taken over"):
        lost.renew()
    lease.renew()


def test_a_lease_that_a_killed_process_left_on_this_machine_can_be_acquired_at_once(
    server: BucketServer,
) -> None:
    Lease(server.url("run"), "a").__enter__()
    with Lease(server.url("run"), "a") as lease:
        lease.renew()


@pytest.mark.parametrize("server", ["s3"], indirect=True)
def test_of_two_processes_that_start_together_one_gets_the_lease(
    server: BucketServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (Lease(server.url("run"), machine) for machine in "ab")
    monkeypatch.setattr(second, "_numbers", list)
    first.__enter__()
    with pytest.raises(UsageError, match="by a process that has just started"):
        second.__enter__()
    first.renew()


@pytest.mark.parametrize("server", ["s3"], indirect=True)
def test_a_process_that_waits_gets_the_lease_after_the_others(
    server: BucketServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (Lease(server.url("run"), machine, waits=True) for machine in "ab")
    outdated, numbers = [list[int]()], second._numbers
    monkeypatch.setattr(second, "_numbers", lambda: outdated.pop() if outdated else numbers())
    first.__enter__()
    # The first process renews its lease once, and then releases it.
    actions = iter([first.renew, lambda: first.__exit__(None, None, None)])
    monkeypatch.setattr("time.sleep", lambda _: next(actions)())
    with pytest.warns(Note, match="waiting up to 1 s"), second:
        second.renew()
    assert next(actions, None) is None


@pytest.mark.parametrize("value", ["3m", "0", "-1", "inf", "nan"])
def test_the_seconds_of_a_lease_must_be_a_positive_number(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRANSFORMER_JAX_LEASE_SECONDS", value)
    message = f"^TRANSFORMER_JAX_LEASE_SECONDS must be a positive number of seconds.*{value!r}$"
    with pytest.raises(UsageError, match=message):
        Lease("s3://bucket/run", "a")
