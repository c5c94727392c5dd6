"""The devices to compile for, such as `v5e:2x4` (a TPU slice) or `h100:8` (eight GPUs).

This module does not import JAX.
"""

import math
import re
from dataclasses import dataclass
from importlib import resources
from typing import NamedTuple

from transformer_jax.config.validation import did_you_mean
from transformer_jax.errors import UsageError
from transformer_jax.files import is_stray

GIB = 1 << 30
# XLA's descriptions of GPUs, with one file per kind of GPU.
GPU_FOLDER = resources.files("transformer_jax.compilation") / "gpus"
# JAX reserves this fraction of a GPU's memory unless XLA_PYTHON_CLIENT_MEM_FRACTION is set.
GPU_MEMORY_FRACTION = 0.75
GPUS_PER_HOST = 8
# TPU hosts have 2 x 2 chips. A v5e or v6e slice of at most eight chips has a single host.
CHIPS_PER_HOST = (2, 2, 1)
MAX_SINGLE_HOST_CHIPS = 8
MAX_DEVICES = 1 << 16


class TPU(NamedTuple):
    """A generation of TPUs."""

    capacity: float
    """The usable memory per device in GiB, from the error messages of libtpu 0.0.42."""
    dimensions: int
    """The number of dimensions of a slice."""
    devices_per_chip: int = 1


TPUS = {
    # With the "megacore" configuration, the two cores of a chip form one device.
    "v4": TPU(30.75, dimensions=3),
    "v5e": TPU(15.75, dimensions=2),
    "v5p": TPU(95.74, dimensions=3),
    "v6e": TPU(31.25, dimensions=2),
    "tpu7x": TPU(94.75, dimensions=3, devices_per_chip=2),
}
KINDS = (
    *TPUS,
    *sorted(
        file.name.removesuffix(".txtpb") for file in GPU_FOLDER.iterdir() if not is_stray(file.name)
    ),
)


@dataclass(frozen=True)
class Target:
    """The devices that a program is compiled for."""

    kind: str
    """A generation of TPUs, such as "v5e", or a kind of GPU, such as "h100"."""
    shape: tuple[int, ...]
    """The number of chips along each axis, or the numbers of hosts and of GPUs per host."""

    @property
    def topology(self) -> str:
        """The topology in XLA's format: "v5e:2x4", or slices, hosts, and GPUs as "1x2x8"."""
        shape = "x".join(map(str, self.shape))
        return f"{self.kind}:{shape}" if self.is_tpu else f"1x{shape}"

    @property
    def num_devices(self) -> int:
        """The number of JAX devices."""
        return math.prod(self.shape) * (TPUS[self.kind].devices_per_chip if self.is_tpu else 1)

    @property
    def is_tpu(self) -> bool:
        """Whether the devices are TPUs rather than GPUs."""
        return self.kind in TPUS

    @property
    def unit(self) -> str:
        """The name for one device: "GPU", "chip", or, if a chip has several devices, "core"."""
        if self.is_tpu:
            return "chip" if TPUS[self.kind].devices_per_chip == 1 else "core"
        return "GPU"

    @property
    def host_bounds(self) -> tuple[int, int, int]:
        """The number of TPU chips per host along each of three axes."""
        chips, is_flat = math.prod(self.shape), TPUS[self.kind].dimensions == 2
        if chips == 1 or (is_flat and chips <= MAX_SINGLE_HOST_CHIPS):
            x, y, z = (*self.shape, 1)[:3]
            return x, y, z
        return CHIPS_PER_HOST

    @property
    def num_hosts(self) -> int:
        """The number of hosts, each of which runs one process."""
        if self.is_tpu:
            return math.prod(self.shape) // math.prod(self.host_bounds)
        return self.shape[0]

    @property
    def capacity(self) -> int:
        """The memory that a program can use on each device, in bytes."""
        if self.is_tpu:
            return int(TPUS[self.kind].capacity * GIB)
        size = re.search(r"device_memory_size: (\d+)", self.gpu_description)
        return int(GPU_MEMORY_FRACTION * int(size[1])) if size else 0

    @property
    def gpu_description(self) -> str:
        """The GPU's description: XLA's `GpuTargetConfigProto` in text format."""
        return (GPU_FOLDER / f"{self.kind}.txtpb").read_text("utf-8")

    def __str__(self) -> str:
        if self.num_devices == 1:
            return self.kind
        shape = self.shape if self.is_tpu or self.num_hosts > 1 else self.shape[1:]
        return f"{self.kind}:{'x'.join(map(str, shape))}"


def parse_target(text: str) -> Target:
    """Return the target that `text` specifies, with a single device if `text` has no shape.

    Examples: `v5e:2x4` means 8 TPU chips, `v4:2x2x1` means 4 TPU chips, `h100:8` means one host
    with 8 GPUs, and `h100:16` and `h100:2x8` both mean two hosts with 8 GPUs each.
    """
    kind, colon, layout = text.partition(":")
    if kind not in KINDS:
        hint = did_you_mean(kind, KINDS)
        raise UsageError(f"no target {kind!r}{hint} (available: {', '.join(KINDS)})")
    if not colon:
        return Target(kind, (1,) * (TPUS[kind].dimensions if kind in TPUS else 2))
    example = _example(kind)
    if not re.fullmatch(r"[1-9]\d{0,4}(x[1-9]\d{0,4})*", layout):
        raise UsageError(f"a target is KIND or KIND:SHAPE, such as {example}, got {text!r}")
    shape = tuple(map(int, layout.split("x")))
    if math.prod(shape) > MAX_DEVICES:
        raise UsageError(f"a target has at most {MAX_DEVICES:,} devices, got {text!r}")
    return _tpu_slice(kind, shape, text) if kind in TPUS else _gpu_hosts(kind, shape, text)


def _example(kind: str) -> str:
    if kind not in TPUS:
        return f"{kind}:8"
    return f"{kind}:2x4" if TPUS[kind].dimensions == 2 else f"{kind}:2x2x1"


def _tpu_slice(kind: str, shape: tuple[int, ...], text: str) -> Target:
    dimensions = TPUS[kind].dimensions
    if len(shape) != dimensions:
        raise UsageError(
            f"a {kind} slice has {dimensions} dimensions, such as {_example(kind)}, got {text!r}"
        )
    target = Target(kind, shape)
    bounds = target.host_bounds[:dimensions]
    if any(size % bound for size, bound in zip(shape, bounds, strict=True)):
        hosts = "x".join(map(str, bounds))
        raise UsageError(f"a {kind} slice consists of hosts with {hosts} chips, got {text!r}")
    return target


def _gpu_hosts(kind: str, shape: tuple[int, ...], text: str) -> Target:
    if len(shape) == 1:
        [count] = shape
        if count > GPUS_PER_HOST and count % GPUS_PER_HOST:
            raise UsageError(
                f"{text} cannot be divided into hosts with {GPUS_PER_HOST} GPUs; name the hosts: "
                f"{kind}:HOSTSxGPUS"
            )
        hosts = -(-count // GPUS_PER_HOST)
        return Target(kind, (hosts, count // hosts))
    if len(shape) != 2:
        raise UsageError(f"GPUs are {kind}:GPUS or {kind}:HOSTSxGPUS, got {text!r}")
    return Target(kind, shape)
