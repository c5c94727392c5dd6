"""Test barriers, broadcasts, and votes across processes, which are simulated with threads."""

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import jax
import pytest
from bucket_servers import BucketServer
from example_configs import SMALL

from transformer_jax.api import train_folder
from transformer_jax.distributed import processes
from transformer_jax.distributed.processes import ProcessGroup, StepConsensus, Vote
from transformer_jax.errors import UsageError, show_paths
from transformer_jax.remote.buckets import Bucket
from transformer_jax.remote.copies import local_path

T = TypeVar("T")


class Store:
    """A thread-safe key-value store with the same interface as the one in `jax.distributed`."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self.requests: set[tuple[int, str, str]] = set()
        """The process, method, and key of each request. Repeated requests count once."""
        self._changed = threading.Condition()

    def key_value_set(self, key: str, value: str) -> None:
        with self._changed:
            self.requests.add((threading.get_ident(), "set", key))
            assert key not in self._values
            self._values[key] = value
            self._changed.notify_all()

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
        with self._changed:
            self.requests.add((threading.get_ident(), "get", key))
            # Calls to JAX's key-value store occasionally time out, so simulate timeouts.
            if not self._changed.wait_for(lambda: key in self._values, timeout_in_ms / 1e5):
                raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: GetKeyValue() timed out")
            return self._values[key]


def run_in_each(
    action: Callable[[ProcessGroup], T], monkeypatch: pytest.MonkeyPatch, count: int = 3
) -> list[T]:
    """Call a function in several simulated processes, and return the results in order."""
    store = Store()
    monkeypatch.setattr(processes, "key_value_store", lambda: store)
    with ThreadPoolExecutor(count) as executor:
        return list(executor.map(action, (ProcessGroup(count, i) for i in range(count))))


def test_a_broadcast_gives_all_processes_the_value_of_the_primary(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broadcast_twice(group: ProcessGroup) -> list[object]:
        first = group.broadcast({"index": group.index})
        group.barrier()
        return [first, group.broadcast([group.index, None, 0.1])]

    results = run_in_each(broadcast_twice, monkeypatch)
    assert results == [[{"index": 0}, [0, None, 0.1]]] * 3


def test_no_process_passes_a_barrier_before_the_last_one_arrives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arrived = list[int]()

    def arrive(group: ProcessGroup) -> int:
        arrived.append(group.index)
        group.barrier()
        return len(arrived)

    assert run_in_each(arrive, monkeypatch) == [3, 3, 3]


@pytest.mark.parametrize("value_of_2", [False, True])
def test_all_processes_learn_whether_all_values_are_true(
    value_of_2: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = run_in_each(lambda group: group.all_true(group.index < 2 or value_of_2), monkeypatch)
    assert results == [value_of_2] * 3


@pytest.mark.parametrize("server", ["s3"], indirect=True)
def test_processes_of_a_run_in_a_bucket_with_separate_caches_end_and_release_the_lease(
    server: BucketServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # No process in the cache of process 1 holds a lease. Two runs in one cache simulate this.
    urls = [server.url(f"runs/{index}") for index in range(2)]
    paths = [local_path(url) for url in urls]

    def train(group: ProcessGroup) -> str:
        with pytest.raises(UsageError) as error:
            train_folder(SMALL, paths[group.index], group=group)
        # The first error would end the primary process, so the lease must be released by now.
        lease = json.loads(Bucket(f"{urls[0]}/lease").read("1.json") or "{}")
        assert lease["released"]
        return show_paths(str(error.value))

    start = "the processes that train {} need one cache: set TRANSFORMER_JAX_CACHE to a folder on"
    for url, message in zip(urls, run_in_each(train, monkeypatch, count=2), strict=True):
        assert message.startswith(start.format(url))


@pytest.mark.parametrize("count", [2, 4, 8])
def test_the_requests_of_a_barrier_are_proportional_to_the_number_of_processes(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_in_each(ProcessGroup.barrier, monkeypatch, count)
    store: Any = processes.key_value_store()
    # Each other process announces itself and waits, and the primary waits for it and answers all.
    assert len(store.requests) == 3 * (count - 1) + 1


def test_all_processes_must_have_the_same_config_except_for_the_data_folder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def check(group: ProcessGroup) -> str:
        config = SMALL.change(data={"folder": f"/data/{group.index}"})
        if group.index == 2:
            config = config.change(train={"steps": 9})
        try:
            group.check_same_config(config)
        except UsageError as error:
            return str(error)
        return ""

    message = (
        "process 2 has different options from process 0: train.steps 8 in process 0, 9 in this "
        "process"
    )
    assert run_in_each(check, monkeypatch) == ["", "", message]


def test_a_single_process_does_not_wait() -> None:
    group = ProcessGroup()
    group.barrier()
    assert group.is_primary
    value = object()
    assert group.broadcast(value) is value
    assert StepConsensus(group).vote(3, 15, True) == Vote(3, 15, True)


def test_several_processes_learn_a_vote_two_steps_later() -> None:
    # The simulated processes all use this process's devices.
    consensus = StepConsensus(ProcessGroup(2, 0))
    votes = [(1, 0, False), (2, 15, False), (3, 0, True), (4, 0, False), (5, 0, False)]
    assert [consensus.vote(*vote) for vote in votes] == [
        Vote(0, 0, False),
        Vote(0, 0, False),
        Vote(1, 0, False),
        Vote(2, 15, False),
        Vote(3, 0, True),
    ]
