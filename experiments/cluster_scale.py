"""Measure the traffic between the processes of a run, and its requests to a bucket.

    python -m experiments.cluster_scale traffic 2 4 8 16  # needs root, 10 min
    python -m experiments.cluster_scale requests  # 2 min
    python -m experiments.cluster_scale files RUN

`traffic` starts the processes in a separate network namespace, so that its loopback interface
carries only their bytes. `requests` trains a small run in a bucket on a local S3 server (moto) and
counts the requests between two checkpoints. `files` lists the files and bytes of a run's checkpoint
by process. docs/clusters.md contains the results.
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from transformer_jax.distributed.processes import StepConsensus, join_processes

ROOT = Path(__file__).parents[1]
ADDRESS = "127.0.0.1:29433"
REPEATS = 50
SMALL = (
    *("--model.d-model", "16", "--model.num-layers", "1", "--model.num-heads", "2"),
    *("--model.d-ff", "16", "--data.batch-tokens", "256", "--data.max-batch-shapes", "1"),
    *("--train.steps", "40", "--train.checkpoint-every", "10", "--train.bleu-every", "1000"),
)


def bytes_on_loopback() -> tuple[int, int]:
    """Return the bytes and packets that the loopback interface has sent."""
    [line] = [x for x in Path("/proc/net/dev").read_text("utf-8").splitlines() if " lo:" in f" {x}"]
    numbers = line.partition(":")[2].split()
    return int(numbers[8]), int(numbers[9])


def work(count: int, index: int) -> None:
    """Join the other processes and, in process 0, print the bytes of each kind of traffic."""
    start = bytes_on_loopback()[0]
    began = time.monotonic()
    with join_processes(Path("run"), ADDRESS, count, index) as group:
        group.barrier()
        lines = [f"start {bytes_on_loopback()[0] - start} bytes, {time.monotonic() - began:.1f} s"]
        consensus = StepConsensus(group)
        step = 0

        def vote() -> None:
            nonlocal step
            step += 1
            consensus.vote(step, 0, False)

        actions: dict[str, Callable[[], object]] = {
            "barrier": group.barrier,
            "broadcast": lambda: group.broadcast(0),
            "vote": vote,
        }
        for name, action in actions.items():
            for _ in range(3):
                action()
            group.barrier()
            before = bytes_on_loopback()
            for _ in range(REPEATS):
                action()
            group.barrier()
            after = bytes_on_loopback()
            sent, packets = ((y - x) / REPEATS for x, y in zip(before, after, strict=True))
            lines.append(f"{name} {sent:.0f} bytes, {packets:.1f} packets")
        if index == 0:
            print(f"{count} processes: " + "; ".join(lines), flush=True)
        group.barrier()


def measure_traffic(counts: list[int]) -> None:
    """Run `work` with each number of processes in a new network namespace."""
    for count in filter(lambda x: x > 1, counts):
        worker = f"{sys.executable} -m experiments.cluster_scale work {count}"
        script = (
            f"ip link set lo up; for i in $(seq {count - 1}); do {worker} $i & done; {worker} 0"
        )
        environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
        command = ["unshare", "--net", "/bin/sh", "-c", f"{script}; wait"]
        subprocess.run(command, env=environment, check=True)  # noqa: S603


def measure_requests() -> None:
    """Train a small run in a bucket, and print the requests of each checkpoint."""
    sys.path.append(str(ROOT / "tests" / "support"))
    from bucket_servers import serve_bucket

    with tempfile.TemporaryDirectory() as cache, serve_bucket("s3") as server:
        environment = {**os.environ, **server.environment, "TRANSFORMER_JAX_CACHE": cache}
        command = [sys.executable, "-m", "transformer_jax", "train", "tiny"]
        command += ["--out", server.url("run"), *SMALL]
        subprocess.run(command, env=environment, check=True, capture_output=True)  # noqa: S603
        kinds = Counter[tuple[str, str]]()
        for line in server.weather.writes:
            method, path = line.split(" ", 1)
            step = re.search(r"checkpoints/(\d+)/", path)
            kinds[f"checkpoint {step[1]}" if step else "other", method] += 1
        for (kind, method), number in sorted(kinds.items()):
            print(f"{kind}: {number} {method}")
        print(f"reads: {len(server.weather.reads)}")


def list_files(run: Path) -> None:
    """Print the number of files and bytes of the latest checkpoint by process."""
    steps = [int(x.name) for x in (run / "checkpoints").iterdir() if x.name.isdecimal()]
    folder = run / "checkpoints" / str(max(steps))
    files, sizes = Counter[str](), Counter[str]()
    for path in filter(Path.is_file, folder.rglob("*")):
        owner = re.search(r"process_(\d+)", str(path.relative_to(folder)))
        name = f"process {owner[1]}" if owner else "process 0 (shared files)"
        files[name] += 1
        sizes[name] += path.stat().st_size
    for name in sorted(files):
        print(f"{name}: {files[name]} files, {sizes[name]:,} bytes")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["traffic", *counts]:
            measure_traffic(list(map(int, counts)))
        case ["work", count, index]:
            work(int(count), int(index))
        case ["requests"]:
            measure_requests()
        case ["files", run]:
            list_files(Path(run))
        case _:
            sys.exit(__doc__)
