"""List the collectives in a compiled program, given its HLO text.

HLO text is a list of computations. Each instruction is a line such as this one:

    %all-reduce.5 = (bf16[512,64]{1,0}, f32[8]{0}) all-reduce(%a, %b), channel_id=3, ...
"""

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

KINDS = {
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
}
# On a TPU, XLA compiles a reduce-scatter to a fusion of an all-reduce and slices.
TPU_REDUCE_SCATTER = "all-reduce-scatter"
TPU_OVERLAPPING_FUSION = "async_collective_fusion"
# The number of bytes per element of each data type, excluding device-specific padding and packing.
WIDTHS = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "s32": 4, "u32": 4, "s64": 8, "u64": 8}
WIDTHS |= {"bf16": 2, "f16": 2, "f32": 4, "f64": 8, "f8e4m3fn": 1, "f8e5m2": 1, "c64": 8}
COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
INSTRUCTION = re.compile(r"^\s+(ROOT )?%?[\w.\-]+ = (.*?) ([a-z][a-z\-]*)\((.*)$")
ARRAY = re.compile(r"\b([a-z]+\d*(?:e\d+m\d+\w*)?)\[([\d,]*)\]")
CALLED = re.compile(r"(?:body|condition|to_apply|calls|\w+_computation)=%?([\w.\-]+)")
BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
TRIP_COUNT = re.compile(r'known_trip_count":\{"n":"(\d+)"')


@dataclass(frozen=True)
class Collectives:
    """The collectives of one kind and data type that one device runs in a step."""

    kind: str
    """The HLO operation, such as "all-reduce"."""
    dtype: str
    """XLA's name for the data type, such as "bf16"."""
    count: int
    """The number of collectives in a step, if each loop of unknown length has one iteration."""
    bytes: int
    """The total size of the collectives' results, in bytes."""


@dataclass(frozen=True)
class Instruction:
    """An HLO instruction: one line of HLO text."""

    is_root: bool
    """Whether this instruction is the root of its computation, which produces the result."""
    shape: str
    operation: str
    rest: str
    """The text after the parenthesis that opens the list of operands."""


def read_collectives(text: str) -> list[Collectives]:
    """Parse HLO text and return its collectives, sorted by kind and data type."""
    counts, sizes = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    computations, entry = read_computations(text)
    for name, times in count_executions(computations, entry).items():
        if _continues_collective(name, computations[name]):
            continue
        for instruction in computations[name]:
            kind = instruction.operation.removesuffix("-start")
            if kind not in KINDS:
                continue
            shape = _result_shape(instruction)
            if name.startswith(TPU_REDUCE_SCATTER):
                kind = "reduce-scatter"
                shape = next(x.shape for x in computations[name] if x.is_root)
            results = list(array_sizes(shape))
            for dtype in {dtype for dtype, _ in results}:
                counts[kind, dtype] += times
            for dtype, size in results:
                sizes[kind, dtype] += times * size
    return [Collectives(*key, counts[key], sizes[key]) for key in sorted(counts)]


def read_computations(text: str) -> tuple[dict[str, list[Instruction]], str]:
    """Return each computation's instructions and the name of the entry computation."""
    computations: dict[str, list[Instruction]] = {}
    entry, name = "", ""
    for line in text.splitlines():
        if (head := COMPUTATION.match(line)) is not None:
            name = head[2]
            computations[name] = []
            entry = name if head[1] else entry
        elif (match := INSTRUCTION.match(line)) is not None and name:
            computations[name].append(Instruction(bool(match[1]), match[2], match[3], match[4]))
    return computations, entry


def count_executions(computations: dict[str, list[Instruction]], entry: str) -> dict[str, int]:
    """Return how many times a step runs each computation, counting all branches of conditionals."""
    executions, pending = {entry: 1}, [entry]
    while pending:
        caller = pending.pop()
        for instruction in computations[caller]:
            trips = TRIP_COUNT.search(instruction.rest)
            times = executions[caller] * (int(trips[1]) if trips else 1)
            for callee in _called_computations(instruction.rest):
                if callee in computations and callee not in executions:
                    executions[callee] = times
                    pending.append(callee)
    return executions


def array_sizes(shape: str) -> Iterator[tuple[str, int]]:
    """Yield the data type and size in bytes of each array in a shape like `(f32[8], s32[])`."""
    for dtype, dimensions in ARRAY.findall(shape):
        if dtype in WIDTHS:
            yield dtype, WIDTHS[dtype] * math.prod(int(d) for d in dimensions.split(",") if d)


def _called_computations(rest: str) -> list[str]:
    branches = BRANCHES.search(rest)
    names = branches[1].split(",") if branches else []
    return [*CALLED.findall(rest), *(name.strip().removeprefix("%") for name in names)]


def _continues_collective(name: str, computation: list[Instruction]) -> bool:
    """Return whether a computation only continues a collective that another computation starts.

    On a TPU, every fusion that overlaps with a collective contains a copy of that collective, and
    so does the fusion that waits for the collective to finish.
    """
    is_end = any("AsyncCollectiveDone" in instruction.rest for instruction in computation)
    return is_end or name.startswith(TPU_OVERLAPPING_FUSION)


def _result_shape(instruction: Instruction) -> str:
    """Return the result's shape; most asynchronous operations also list their operands' shapes."""
    if instruction.operation == "all-reduce-start" or not instruction.operation.endswith("-start"):
        return instruction.shape
    # The shape has the form (operand, result, ...) or ((operands), (results), ...).
    groups = re.findall(r"\([^()]*\)", re.sub(r"\{[^{}]*\}", "", instruction.shape[1:-1]))
    if groups:
        return groups[1]
    arrays = [match[0] for match in ARRAY.finditer(instruction.shape)]
    return arrays[1]
