"""Test that a run's processes find each other or report what is missing."""

import os
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from transformer_jax.console import format_for_shell
from transformer_jax.distributed.processes import join_processes
from transformer_jax.distributed.rendezvous import ProcessSpec, rendezvous, resolve_cluster
from transformer_jax.errors import ConnectionFailedError, UsageError


def free_port() -> int:
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]


def test_process_0_is_connected_to_every_other_process_of_its_run() -> None:
    coordinator = f"127.0.0.1:{free_port()}"
    connections: dict[int, dict[int, socket.socket]] = {}

    def connect(index: int) -> None:
        connections[index] = rendezvous(ProcessSpec(coordinator, 3, index), 60)

    threads = [threading.Thread(target=connect, args=(index,)) for index in range(3)]
    threads[0].start()
    # The first line is what a port scanner might send. The second line comes from a run with a
    # different number of processes.
    for line in (b"GET / HTTP/1.0\n", b"transformer-jax 1 of 2\n"):
        stranger = connect_to(coordinator)
        stranger.sendall(line)
        assert stranger.recv(1) == b""
        stranger.close()
    for thread in threads[1:]:
        thread.start()
    for thread in threads:
        thread.join()
    assert {index: set(others) for index, others in connections.items()} == {
        0: {1, 2},
        1: {0},
        2: {0},
    }
    for index in (1, 2):
        connections[index][0].sendall(str(index).encode())
        assert connections[0][index].recv(1) == str(index).encode()
    for others in connections.values():
        for connection in others.values():
            connection.close()


def connect_to(coordinator: str) -> socket.socket:
    """Wait until the coordinator's port is open, then connect to it."""
    host, port = coordinator.split(":")
    while True:
        try:
            return socket.create_connection((host, int(port)), timeout=60)
        except ConnectionRefusedError:
            continue


def test_a_missing_process_0_is_reported() -> None:
    coordinator = f"127.0.0.1:{free_port()}"
    with pytest.raises(
        ConnectionFailedError, match=rf"process 0 was not found at {coordinator} within 1 s"
    ):
        rendezvous(ProcessSpec(coordinator, 2, 1), 1)
    with pytest.raises(ConnectionFailedError, match=r"not found at nowhere\.invalid:1 "):
        rendezvous(ProcessSpec("nowhere.invalid:1", 2, 1), 0.1)


def test_missing_other_processes_are_named() -> None:
    with pytest.raises(ConnectionFailedError, match=r"2 of 3 processes did not connect .*: 1, 2$"):
        rendezvous(ProcessSpec(f"127.0.0.1:{free_port()}", 3, 0), 0.3)


def test_a_port_in_use_is_reported() -> None:
    with socket.create_server(("", 0)) as server:
        coordinator = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(
            ConnectionFailedError, match=f"cannot listen at {coordinator}: Address already in"
        ):
            rendezvous(ProcessSpec(coordinator, 2, 0), 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((None, 2, 0), "--num-processes 2 also needs --coordinator HOST:PORT"),
        (("host:1", 2, None), "--coordinator host:1 also needs --process-id INDEX"),
        (("host:1", 2, 2), "--process-id 2 must be from 0 to 1, given --num-processes 2"),
        (("host:1", 0, 0), "--num-processes 0 must be positive"),
        (("host", 2, 1), "--coordinator host must be HOST:PORT"),
        (("host:99999", 2, 1), "--coordinator host:99999 must be HOST:PORT"),
    ],
)
def test_incomplete_or_invalid_options_are_refused(options: Any, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        resolve_cluster(*options)
    assert format_for_shell(caught.value) == message


SLURM = {
    "SLURM_JOB_ID": "5000",
    "SLURM_STEP_NODELIST": "node[1-2]",
    "SLURM_NTASKS": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
}
MPI = {
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        # A process uses all devices of its node if no other process runs there. Otherwise, each
        # process uses one device.
        (SLURM, ProcessSpec("node1:62344", 2, 1)),
        (SLURM | {"SLURM_STEP_NUM_NODES": "1"}, ProcessSpec("node1:62344", 2, 1, [0])),
        (MPI, ProcessSpec("10.96.0.1:62624", 8, 5, [1])),
        # With `srun --gpus-per-task=1`, each process sees only its own GPU, which has number 0.
        (
            SLURM
            | {"SLURM_STEP_NUM_NODES": "1", "SLURM_LOCALID": "1", "CUDA_VISIBLE_DEVICES": "0"},
            ProcessSpec("node1:62344", 2, 1),
        ),
        # These environments come from an sbatch script, a single-task Slurm step, and a machine
        # that is not part of a cluster.
        ({"SLURM_JOB_ID": "5000", "SLURM_NTASKS": "2", "SLURM_PROCID": "0"}, None),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "1"}, None),
        ({"SLURM_STEP_NUM_TASKS": "", "OMPI_COMM_WORLD_SIZE": ""}, None),
        ({}, None),
    ],
)
def test_the_environment_of_a_cluster_is_detected(
    environment: dict[str, str], expected: ProcessSpec | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in list(os.environ):
        if name.startswith(("SLURM_", "OMPI_", "KUBERNETES_", "JAX_COORDINATOR")):
            monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert resolve_cluster(None, None, None) == expected


def test_processes_that_mpirun_starts_in_a_slurm_step_have_one_device_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in {**SLURM, **MPI}.items():
        monkeypatch.setenv(name, value)
    spec = resolve_cluster(None, None, None)
    assert spec is not None
    assert len(spec.local_devices or ()) == 1


@pytest.mark.parametrize("name", ["SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"])
def test_a_number_of_processes_that_is_not_a_number_is_an_error(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "two")
    with pytest.raises(UsageError, match=f"^{name} must be a number, got 'two': correct it, or"):
        resolve_cluster(None, None, None)


def test_a_cluster_without_an_address_is_an_error_unless_the_process_is_to_train_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Since version 5, Open MPI no longer provides the address of the first process.
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "8")
    with pytest.raises(UsageError) as caught:
        resolve_cluster(None, None, None)
    assert "--coordinator HOST:PORT" in format_for_shell(caught.value)
    assert "or --num-processes 1 to" in format_for_shell(caught.value)
    with join_processes(Path("run"), None, 1, None) as group:
        assert group.count == 1
