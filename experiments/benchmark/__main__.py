"""Compare this project's speed with that of other libraries and with earlier results.

To list a command's options, use --help:

    python -m experiments.benchmark {train,decode,input,scaling,gpu,compare} --help
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Fixed, Positional, Suppress, arg

from experiments.benchmark import benchmarks
from experiments.benchmark import gpu as on_gpu
from experiments.benchmark.compare import compare
from experiments.benchmark.measurements import Benchmark
from experiments.benchmark.results import Results, to_markdown
from experiments.benchmark.rounds import Settings
from experiments.benchmark.serving import serve
from experiments.benchmark.workloads import SIZES, load_sizes
from transformer_jax.commands.arguments import parse_program
from transformer_jax.config.loading import load_config
from transformer_jax.console import run_and_report, stderr, stdout
from transformer_jax.errors import SweepFailedError, UsageError

PROGRAM = "python -m experiments.benchmark"
SizesName = Positional[Annotated[str, arg(metavar="SIZES", help=", ".join(SIZES))]]
Changes = Annotated[
    tuple[str, ...],
    arg(name="set", metavar="NAME=NUMBER", help="Change sizes, such as batch=8 src=64."),
]


@dataclass(frozen=True)
class MeasureCommand:
    """Base class for commands that run benchmarks."""

    out: Path = Path("benchmarks")
    """Folder for the results: a JSON file with all samples, and a table."""
    torch_python: str = sys.executable
    """Python interpreter that can import torch, transformers, and ctranslate2."""
    rounds: int = 9
    """Number of rounds. Each worker runs once per round."""
    steps: int = 1
    """Number of steps per round."""

    @property
    def settings(self) -> Settings:
        """Return the settings that the command-line options specify."""
        for name in ("rounds", "steps"):
            if (value := getattr(self, name)) < 1:
                raise UsageError(f"--{name} must be positive, got {value}")
        return Settings(self.rounds, self.steps, self.torch_python, say=stderr.print)

    def save(self, results: Results, folder: Path | None = None) -> None:
        """Print and store results. `folder` defaults to `out`."""
        stdout.print(to_markdown(results))
        stdout.print(f"saved to {results.store(folder or self.out)}")
        if not any(part.measurements for part in results.benchmarks):
            raise SweepFailedError("no worker could run")


@dataclass(frozen=True)
class Train(MeasureCommand):
    """Compare the speed of training steps on a batch without padding."""

    sizes: SizesName = "base"
    changes: Changes = ()
    only: str | None = None
    """Comma-separated list of workers: ours, torch, torch-compiled."""

    def run(self) -> None:
        """Measure, print, and save the duration of a training step."""
        sizes = load_sizes(self.sizes, self.changes)
        name = f"train {self.sizes}"
        part = benchmarks.train(name, sizes, self.settings, only=self.only)
        self.save(Results.collect("train", [part]))


@dataclass(frozen=True)
class Decode(MeasureCommand):
    """Compare greedy and beam search on 64 sentences of 20 tokens, with translations of 40 tokens.

    With --serve, use a run's model and its CTranslate2 exports (float32 and int8) to translate up
    to 64 lines from the development set.
    """

    sizes: SizesName = "base"
    changes: Changes = ()
    only: str | None = None
    """Comma-separated list of workers: ours, ctranslate2, hf. With --serve, the choices
    are ours, ctranslate2, and ctranslate2-int8."""
    serve: Path | None = None
    """A run's folder. The run's config determines the model's dimensions."""
    beam: tuple[int, ...] = (1, 4)
    """Beam sizes; 1 means greedy search."""
    rounds: int = 5

    def run(self) -> None:
        """Measure, print, and save the duration of each search."""
        sizes = load_sizes(self.sizes, self.changes)
        if min(self.beam, default=0) < 1:
            raise UsageError(f"--beam must be positive, got {self.beam}")
        if self.serve is not None and (self.sizes, self.changes) != ("base", ()):
            raise UsageError("--serve measures the run's own model: leave out SIZES and --set")
        measured: list[Benchmark] = []
        for beam in self.beam:
            search = f"beam {beam}" if beam > 1 else "greedy"
            if self.serve is None:
                name = f"decode {self.sizes}, {search}"
                part = benchmarks.decode(name, sizes, self.settings, beam_size=beam, only=self.only)
            else:
                name = f"serve {self.serve.name}, {search}"
                part = serve(name, self.serve, self.settings, beam_size=beam, only=self.only)
            measured.append(part)
        self.save(Results.collect("decode", measured))


@dataclass(frozen=True)
class Input(MeasureCommand):
    """Compare a run's training loop with the same steps on preloaded batches."""

    config: Positional[Annotated[str, arg(metavar="CONFIG")]] = ""
    """A config file. Default: multi30k if $TRANSFORMER_JAX_DATA is set, otherwise tiny."""
    rounds: int = 5
    steps: int = 10

    def run(self) -> None:
        """Measure, print, and save the speed of the training loop."""
        usual = "multi30k" if "TRANSFORMER_JAX_DATA" in os.environ else "tiny"
        part = benchmarks.loop("input", load_config(self.config or usual), self.settings)
        self.save(Results.collect("input", [part]))


@dataclass(frozen=True)
class Scaling(MeasureCommand):
    """Compare training speed across sentence lengths, with the same number of tokens per step."""

    sizes: SizesName = "base"
    changes: Changes = ("layers=2", "vocab=8000")
    lengths: tuple[int, ...] = benchmarks.LENGTHS
    """Sentence lengths to compare, in tokens. Sources and targets have the same length. All other
    lengths are compared with the first one."""
    tokens: int = 2048
    """Target tokens per step."""
    rounds: int = 5

    def run(self) -> None:
        """Measure, print, and save the duration of a training step for each length."""
        if min(self.lengths, default=0) < 1 or self.tokens < max(self.lengths):
            raise UsageError(
                f"--lengths must be positive, and at most --tokens {self.tokens}, got "
                f"{self.lengths}"
            )
        sizes = load_sizes(self.sizes, self.changes)
        part = benchmarks.scaling(sizes, self.settings, self.lengths, self.tokens)
        self.save(Results.collect("scaling", [part]))


@dataclass(frozen=True)
class Gpu(MeasureCommand):
    """Measure everything that needs a GPU, without network access. Continue with --resume."""

    minutes: float = 9.0
    """Time limit for the whole command."""
    toy: bool = False
    """Use toy models to try the command on any device."""
    resume: Path | None = None
    """A result file that this command wrote. Run only missing benchmarks, and update the file."""
    # Each benchmark has its own number of steps.
    steps: Suppress[Fixed[int]] = 1

    def run(self) -> None:
        """Run the benchmarks that fit within the time limit, and print and save their results."""
        if not self.minutes > 0:
            raise UsageError(f"--minutes must be positive, got {self.minutes}")
        if not self.toy:
            on_gpu.check_gpu_is_available(self.settings)
        results, folder = Results.collect("gpu-toy" if self.toy else "gpu", []), self.out
        if self.resume is not None:
            now, results, folder = results, Results.open(self.resume), self.resume.parent
            if now.command != results.command:
                raise UsageError(f"{self.resume} is a file of {results.command}, not {now.command}")
            if (now.machine, now.commit) != (results.machine, results.commit):
                raise UsageError(f"{self.resume} is from another machine or another commit")
        path = results.store(folder)

        def store(measured: Sequence[Benchmark]) -> None:
            replace(results, benchmarks=list(measured)).store(folder)

        measured, skipped = on_gpu.gpu(
            on_gpu.toy_amount() if self.toy else on_gpu.full_amount(),
            self.settings,
            seconds=60 * self.minutes,
            folder=path.with_suffix(""),
            store=store,
            earlier=results.benchmarks,
        )
        if skipped:
            size = " --toy" if self.toy else ""
            stderr.print(f"continue with `{PROGRAM} gpu{size} --resume {path}`")
        self.save(replace(results, benchmarks=measured, skipped=skipped), folder)


@dataclass(frozen=True)
class Compare:
    """Compare two result files."""

    before: Positional[Path]
    """A JSON file that one of the benchmark commands wrote."""
    after: Positional[Path]
    """A later JSON file that the same command wrote."""

    def run(self) -> None:
        """Print how the second file's results differ from the first file's."""
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
    """Run a command and return its exit code. Print every error as one line."""
    return run_and_report(lambda: parse_program(PROGRAM, COMMANDS, arguments).run())


if __name__ == "__main__":
    sys.exit(main())
