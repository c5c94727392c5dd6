"""Measure this project beside others, and beside itself.

python -m experiments.benchmark {train,decode,input,scaling,gpu,compare} --help
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import tyro
from tyro.conf import Positional, arg

from experiments.benchmark import benchmarks
from experiments.benchmark import gpu as on_gpu
from experiments.benchmark.compare import compare
from experiments.benchmark.results import Benchmark, Results, to_markdown
from experiments.benchmark.workloads import SIZES, load_sizes
from transformer_jax.config.loading import load_config
from transformer_jax.console import run_and_report, stderr, stdout
from transformer_jax.errors import SweepFailedError, UsageError

PROGRAM = "python -m experiments.benchmark"
SizesName = Positional[Annotated[str, arg(metavar="SIZES", help=", ".join(SIZES))]]
Changes = Annotated[
    tuple[str, ...], arg(name="set", metavar="NAME=NUMBER", help="Change sizes, as batch=8 src=64.")
]


@dataclass(frozen=True)
class MeasureCommand:
    """What all that measures takes."""

    out: Path = Path("benchmarks")
    """The folder for results: JSON with every sample, and the table."""
    torch_python: str = sys.executable
    """The Python that PyTorch, Hugging Face and CTranslate2 are in."""
    rounds: int = 9
    """How often each contestant has its turn."""
    steps: int = 1
    """Steps of each turn."""

    @property
    def settings(self) -> benchmarks.Settings:
        """How to measure."""
        for name in ("rounds", "steps"):
            if (value := getattr(self, name)) < 1:
                raise UsageError(f"--{name} must be positive, got {value}")
        return benchmarks.Settings(self.rounds, self.steps, self.torch_python, say=stderr.print)

    def save(self, command: str, found: Sequence[Benchmark], left_out: Sequence[str] = ()) -> None:
        """Show results, and store them."""
        results = Results.collect(command, list(found), left_out)
        stdout.print(to_markdown(results))
        stdout.print(f"kept in {results.store(self.out)}")
        if not any(part.measurements for part in found):
            raise SweepFailedError("no contestant could take part")


@dataclass(frozen=True)
class Train(MeasureCommand):
    """Compare steps of training on a batch without padding."""

    sizes: SizesName = "base"
    changes: Changes = ()
    only: str | None = None
    """Contestants, parted by commas: ours, torch, torch-compiled."""

    def run(self) -> None:
        sizes = load_sizes(self.sizes, self.changes)
        name = f"train {self.sizes}"
        self.save("train", [benchmarks.train(name, sizes, self.settings, only=self.only)])


@dataclass(frozen=True)
class Decode(MeasureCommand):
    """Compare translation of 64 sentences of 20 pieces into 40 each, greedy and by beam."""

    sizes: SizesName = "base"
    changes: Changes = ()
    only: str | None = None
    """Contestants, parted by commas: ours, ctranslate2, hf."""
    beam: tuple[int, ...] = (1, 4)
    """Hypotheses; 1 is greedy search."""
    rounds: int = 5

    def run(self) -> None:
        sizes = load_sizes(self.sizes, self.changes)
        if min(self.beam, default=0) < 1:
            raise UsageError(f"--beam must be positive, got {self.beam}")
        found = [
            benchmarks.decode(
                f"decode {self.sizes}, {f'beam {beam}' if beam > 1 else 'greedy'}",
                sizes,
                self.settings,
                beam_size=beam,
                only=self.only,
            )
            for beam in self.beam
        ]
        self.save("decode", found)


@dataclass(frozen=True)
class Input(MeasureCommand):
    """Compare training on a text, as a run does it, with training on full batches at hand."""

    config: Positional[Annotated[str, arg(metavar="CONFIG")]] = ""
    """A config file; multi30k where $TRANSFORMER_JAX_DATA says where its text is, else tiny."""
    rounds: int = 5
    steps: int = 10

    def run(self) -> None:
        usual = "multi30k" if "TRANSFORMER_JAX_DATA" in os.environ else "tiny"
        self.save("input", [benchmarks.pipeline(load_config(self.config or usual), self.settings)])


@dataclass(frozen=True)
class Scaling(MeasureCommand):
    """Compare steps of as many tokens in longer and longer sentences."""

    sizes: SizesName = "base"
    changes: Changes = ("layers=2", "vocab=8000")
    lengths: tuple[int, ...] = benchmarks.LENGTHS
    """Pieces of source and of target; the first is what others are compared with."""
    tokens: int = 2048
    """Target tokens of each step."""
    rounds: int = 5

    def run(self) -> None:
        if min(self.lengths, default=0) < 1 or self.tokens < max(self.lengths):
            raise UsageError(
                f"--lengths must be positive, and at most --tokens {self.tokens}, got "
                f"{self.lengths}"
            )
        sizes = load_sizes(self.sizes, self.changes)
        self.save("scaling", [benchmarks.scaling(sizes, self.settings, self.lengths, self.tokens)])


@dataclass(frozen=True)
class Gpu(MeasureCommand):
    """Measure all that a GPU is asked for, in minutes, without network."""

    data: str | None = None
    """A config file whose text to take; the embedded corpus where it is not said."""
    minutes: float = 7.5
    """To be done in."""
    toy: bool = False
    """Try the command in small, on whatever device there is."""

    def run(self) -> None:
        if not self.minutes > 0:
            raise UsageError(f"--minutes must be positive, got {self.minutes}")
        config = (
            load_config(self.data) if self.data else on_gpu.number_words_config(is_toy=self.toy)
        )
        if not self.toy:
            on_gpu.check_there_is_one(self.settings)
        amount = on_gpu.TOY if self.toy else replace(on_gpu.FULL, rounds=self.rounds)
        found, left_out = on_gpu.gpu(
            config, amount, self.settings, seconds=60 * self.minutes, say=stderr.print
        )
        self.save("gpu", found, left_out)


@dataclass(frozen=True)
class Compare:
    """Compare two files of results."""

    before: Positional[Path]
    """JSON that a command of this program wrote."""
    after: Positional[Path]
    """The same, later."""

    def run(self) -> None:
        stdout.print(compare(Results.open(self.before), Results.open(self.after)))


COMMANDS: dict[str, Any] = {
    "train": Train,
    "decode": Decode,
    "input": Input,
    "scaling": Scaling,
    "gpu": Gpu,
    "compare": Compare,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return its exit code. A mistake or a fault is one line."""
    return run_and_report(
        lambda: tyro.extras.subcommand_cli_from_dict(COMMANDS, prog=PROGRAM, args=arguments).run()
    )


if __name__ == "__main__":
    sys.exit(main())
