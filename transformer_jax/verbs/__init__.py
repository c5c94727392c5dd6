"""The verbs of the command line, by name."""

from transformer_jax.verbs.base import ConfigVerb, FolderVerb
from transformer_jax.verbs.configs import Diff, Params
from transformer_jax.verbs.inference import Evaluate, Translate
from transformer_jax.verbs.sweeps import Report, Status, Sweep
from transformer_jax.verbs.training import Prepare, Resume, Train

VERBS: dict[str, type[ConfigVerb] | type[FolderVerb]] = {
    "prepare": Prepare,
    "train": Train,
    "resume": Resume,
    "evaluate": Evaluate,
    "translate": Translate,
    "params": Params,
    "diff": Diff,
    "sweep": Sweep,
    "status": Status,
    "report": Report,
}
