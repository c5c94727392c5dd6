"""Configure all tests: check array shapes, and use a separate cache and fast compilation."""

import gc
import os
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
from jaxtyping import install_import_hook

# Set these environment variables before importing the package. All tests use one cache, which is
# separate from the user's cache. The workers in a test session share the test cache, so text is
# prepared and programs are compiled only once.
DEFAULT_CACHE = Path(tempfile.gettempdir()) / f"transformer_jax-tests-{os.getuid()}"
CACHE = Path(os.environ.get("TRANSFORMER_JAX_TEST_CACHE", DEFAULT_CACHE))
os.environ["TRANSFORMER_JAX_CACHE"] = str(CACHE)
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(CACHE / "programs")
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Broadcasting operands of different ranks is usually a mistake, so it must be explicit.
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"
# Lowering is faster if programs do not record the Python frames of each operation.
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"
# Most programs run only once in a test, so LLVM's optimizations cost more time than they save. To
# save more time, use the XLA code emitters that compile fastest. Newer versions of XLA reject the
# flag that selects these emitters. Each test worker gets one thread, because the workers together
# use all cores.
EMITTERS = "--xla_cpu_use_fusion_emitters=false " if version("jaxlib").startswith("0.10.") else ""
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    f"{EMITTERS}--xla_cpu_multi_thread_eigen=false",
)
# Child processes do not check these flags again.
os.environ["TRANSFORMER_JAX_CHECKED_XLA_FLAGS"] = os.environ["XLA_FLAGS"]

# XLA creates about nine memory maps per program, and by default, Linux allows 65,530 per process.
MAX_MEMORY_MAPS = 30_000

SUBPACKAGES = (
    "baselines",
    "model",
    "training",
    "inference",
    "evaluation",
    "sharing",
    "distributed",
    "visualization",
)
install_import_hook([f"transformer_jax.{name}" for name in SUBPACKAGES], "shape_checks.check")

# These modules belong to the package or import it, so import them after the hook is installed.
from bucket_servers import BucketServer, serve_bucket  # noqa: E402
from processes import Forks, open_forks  # noqa: E402

from transformer_jax import registry  # noqa: E402
from transformer_jax.config.loading import IMPORTS  # noqa: E402


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Use one worker per core, and one more for slow tests, which wait for other processes."""
    is_linux = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if is_linux else os.cpu_count() or 1
    return cores + ("not slow" not in config.option.markexpr)


def pytest_configure(config: pytest.Config) -> None:
    """Treat all warnings except notes as errors."""
    config.addinivalue_line("filterwarnings", "default::transformer_jax.progress.Note")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the slowest tests first, on all workers, so that they overlap with other tests.

    `--dist worksteal` initially gives each worker a contiguous part of the tests.
    """
    is_page = [item.name.startswith("test_the_commands_of_a_page") for item in items]
    pages = [item for item, chosen in zip(items, is_page, strict=True) if chosen]
    others = [item for item, chosen in zip(items, is_page, strict=True) if not chosen]
    num_workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    # The first page takes about as long as all others together, so a worker runs no other page.
    count = num_workers - 1
    parts = [pages[:1], *(pages[1 + part :: count] for part in range(count))] if count else [pages]
    ordered: list[pytest.Item] = []
    for part, remaining in zip(parts, range(num_workers, 0, -1), strict=True):
        size = (len(items) - len(ordered)) // remaining
        num_others = max(0, size - len(part))
        ordered += [*part, *others[:num_others]]
        del others[:num_others]
    items[:] = [*ordered, *others]


@pytest.fixture(autouse=True)
def check_imports() -> Iterator[None]:
    """Fail if a test lets the child processes of later tests import its files."""
    files = os.environ.get(IMPORTS)
    yield
    assert os.environ.get(IMPORTS) == files


@pytest.fixture
def forget_parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forget the parts that a test registers and the files that it imports."""
    monkeypatch.setenv(IMPORTS, "")
    yield
    for field, parts in registry._parts.items():
        for name in registry.foreign_names(field):
            del parts[name]
    registry._digests.clear()


@pytest.fixture(autouse=True, scope="module")
def limit_memory_maps() -> Iterator[None]:
    """Discard compiled programs before the process has too many memory maps.

    Without this fixture, Linux would abort a single process that runs all tests.
    """
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > MAX_MEMORY_MAPS:
        import jax

        jax.clear_caches()
        gc.collect()


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    """A process that starts commands quickly by forking."""
    with open_forks() as forks:
        yield forks


@pytest.fixture(params=["s3", "gs"])
def server(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[BucketServer]:
    """A server with an empty bucket, to which the environment variables point."""
    with serve_bucket(request.param) as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("TRANSFORMER_JAX_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("TRANSFORMER_JAX_RETRY_SECONDS", "0.001")
        monkeypatch.setenv("TRANSFORMER_JAX_LEASE_SECONDS", "1")
        if request.param == "gs":
            # gcsfs itself repeats a request five times, after up to 32 seconds each.
            monkeypatch.setattr("gcsfs.retry.min", lambda *_: 0.0, raising=False)
        yield server
