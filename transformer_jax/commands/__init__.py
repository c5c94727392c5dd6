"""The commands of `transformer-jax`, keyed by name."""

from transformer_jax.commands.attention import Attention
from transformer_jax.commands.base import ConfigCommand, PathCommand
from transformer_jax.commands.compilation import Compile
from transformer_jax.commands.configs import Diff, Params
from transformer_jax.commands.evaluation import Evaluate
from transformer_jax.commands.inference import Package, Score, Translate
from transformer_jax.commands.plot import Plot
from transformer_jax.commands.reports import Report, Status
from transformer_jax.commands.sharing import Export, Import
from transformer_jax.commands.sweeps import Sweep
from transformer_jax.commands.training import Prepare, Reproduce, Resume, Train

COMMANDS: dict[str, type[ConfigCommand] | type[PathCommand]] = {
    "prepare": Prepare,
    "train": Train,
    "resume": Resume,
    "reproduce": Reproduce,
    "evaluate": Evaluate,
    "translate": Translate,
    "score": Score,
    "attention": Attention,
    "plot": Plot,
    "package": Package,
    "export": Export,
    "import": Import,
    "params": Params,
    "diff": Diff,
    "compile": Compile,
    "sweep": Sweep,
    "status": Status,
    "report": Report,
}
