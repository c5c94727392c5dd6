"""Commands that exchange models with other programs: `export` and `import`."""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import Positional, arg

from transformer_jax.commands.base import PathCommand, translate_command
from transformer_jax.commands.inference import CheckpointCommand
from transformer_jax.console import shell_command, stderr, stdout
from transformer_jax.errors import UsageError, VerificationFailedError
from transformer_jax.files import check_available
from transformer_jax.runs.run_folder import RunFolder
from transformer_jax.sharing.expressible import Format, check_exportable

if TYPE_CHECKING:
    from transformer_jax.inference.trained_run import Run
    from transformer_jax.sharing.verify import System


@dataclass(frozen=True)
class Export(CheckpointCommand):
    """Write a trained model to a folder that another program can load.

    The folder contains the parameters, the config, and the vocabulary.
    """

    format: Format = "ctranslate2"
    """The format. `ctranslate2` is for serving with CTranslate2. `marian` is for MarianMTModel in
    Hugging Face's transformers library. `safetensors`, which stores the parameters under flat
    names, is for other libraries and for the import command."""
    out: Path | None = None
    """The folder to create. Default: NAME-FORMAT, where NAME is the run's name."""
    quantization: Literal["float32", "bfloat16", "int8"] = "float32"
    """With `ctranslate2`: the data type of the stored parameters. `int8` applies only to
    matrices."""
    verify: bool = True
    """Load the exported model and compare it with the run's model. For `safetensors`, compare the
    parameters; otherwise, compare the translations and scores of twenty sentences. The command
    fails if the results of a float32 model differ by more than rounding can explain."""

    def run(self) -> None:
        if self.format != "ctranslate2" and self.quantization != "float32":
            raise UsageError(
                f"--quantization {self.quantization} needs --format ctranslate2: the "
                f"{self.format} format always stores the exact parameters"
            )
        name = Path(self.run_folder).resolve().name
        out = self.out or Path(f"{name}-{self.format}")
        # Check these arguments before importing JAX, so that errors appear immediately.
        check_available(out)
        check_exportable(RunFolder.open(Path(self.run_folder)).config, self.format)
        run = self.load()
        result = self._export(run, out)
        size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
        steps = ", ".join(map(str, run.steps))
        steps = f"mean of steps {steps}" if run.average_checkpoints > 1 else f"step {steps}"
        details = f"{self.format}, {self.quantization}, {steps}"
        stdout.print(f"exported to {out}: {size / 1e6:.1f} MB, {details}")
        if result is not None:
            is_exact = self.quantization == "float32"
            stdout.print(f"{'verified' if is_exact else 'compared'}: {result}")
        if self.format == "safetensors":
            stdout.print(f"next: {shell_command('import', out)}")

    def _export(self, run: "Run", out: Path) -> str | None:
        """Export the model; return the result of the verification, or None if it is skipped."""
        if self.format == "safetensors":
            from transformer_jax.sharing.packaging import export_safetensors, read_safetensors

            export_safetensors(run, out)
            # Reading the exported folder also verifies the digest of the parameters.
            if self.verify:
                read_safetensors(out)
            return "the parameters are equal" if self.verify else None
        from transformer_jax.sharing import verify

        if self.format == "marian":
            from transformer_jax.sharing.marian_format import LAYER_NORM_EPSILON, export_marian

            export_marian(run, out)
            if (epsilon := run.config.model.layer_norm_epsilon) != LAYER_NORM_EPSILON:
                stderr.print(
                    f"note: Marian's layer normalization uses an epsilon of {LAYER_NORM_EPSILON:g} "
                    f"instead of {epsilon:g}, so scores differ slightly"
                )
            if not self.verify:
                return None
            if find_spec("torch") is None or find_spec("transformers") is None:
                stderr.print("note: export not verified: verification needs transformers and torch")
                return None
            return self._compare(run, verify.MarianSystem(out), out)
        from transformer_jax.sharing.ctranslate2_format import export_ctranslate2, without_padding

        export_ctranslate2(run, out, self.quantization)
        source, target = run.config.model.max_lengths
        if target is not None:
            # The last position of a translation predicts the end-of-sentence token.
            stderr.print(
                f"note: the model has {source} source positions and {target} target positions, and "
                f"CTranslate2 fails beyond them: pass max_input_length={source} and "
                f"max_decoding_length={target - 1} to translate_batch"
            )
        if not self.verify:
            return None
        system = verify.CTranslate2System(out, self.quantization)
        return self._compare(without_padding(run), system, out)

    def _compare(self, run: "Run", system: "System", out: Path) -> str:
        """Compare the exported model's translations with the run's, and describe the differences.

        For float32 parameters, raise an error if rounding cannot explain the differences.
        """
        from transformer_jax.sharing.verify import MAX_SCORE_DIFFERENCE, MIN_EQUAL, verify

        result = verify(run, system)
        if self.quantization == "float32" and not result.is_close:
            raise VerificationFailedError(
                f"{out} was written, but translates differently from the run: {result}; at least "
                f"{MIN_EQUAL:.0%} of translations must be equal, and scores may differ by at most "
                f"{MAX_SCORE_DIFFERENCE}"
            )
        return str(result)


@dataclass(frozen=True)
class Import(PathCommand):
    """Create a run from a model in safetensors format or Hugging Face's Marian format.

    The command reads safetensors and Marian folders that the export command
    wrote, and other Marian models that this package can represent. You can load
    the new run, evaluate it, and use it with `train --init-from`, but you
    cannot resume it.
    """

    source: Positional[Annotated[Path, arg(metavar="SOURCE", help_behavior_hint="(required)")]]
    """The folder to import."""
    out: Path | None = None
    """The new run's folder. Default: the imported folder's name, followed by -run."""

    argument_name = "a folder"

    def run(self) -> None:
        # The file run.json describes a safetensors model, and config.json describes a Marian model.
        if not any((self.source / name).exists() for name in ("run.json", "config.json")):
            raise UsageError(
                f"{self.source} is not an exported model: it has no run.json and no config.json"
            )
        out = self.out or Path(f"{self.source.resolve().name}-run")
        check_available(out)
        from transformer_jax.runs.versions import current_versions
        from transformer_jax.sharing.marian_import import read_marian
        from transformer_jax.sharing.packaging import package_run, read_safetensors

        if (self.source / "run.json").exists():
            run, versions = read_safetensors(self.source), None
        else:
            run, versions = read_marian(self.source), current_versions()
        # Another program may have computed the scores in the imported folder, so the model card
        # omits them.
        folder = package_run(run, out, versions=versions, scores=())
        stdout.print(f"imported to {out}: {run.num_parameters:,} parameters")
        stdout.print(f"next: {translate_command(folder)}")
