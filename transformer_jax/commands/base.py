"""What all verbs are: dataclasses of their arguments, with a method `run`.

JAX is imported inside the methods, so that help and mistakes come at once.
"""

import abc
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Self

from tyro.conf import Positional, arg

from transformer_jax.config import (
    Config,
    DataConfig,
    DecodeConfig,
    ModelConfig,
    Row,
    TrainConfig,
    loading,
)
from transformer_jax.console import shell_command

ConfigArgument = Positional[
    Annotated[str, arg(metavar="CONFIG", help_behavior_hint="(required, and first)")]
]
RunArgument = Positional[Annotated[str, arg(metavar="RUN", help_behavior_hint="(required)")]]


@dataclass(frozen=True)
class ConfigCommand(abc.ABC):
    """Base of the verbs that have the sections of a config as options."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    decode: DecodeConfig = field(default_factory=DecodeConfig)

    argument_name: ClassVar[str] = "a config"

    @classmethod
    def parse_configs(cls, arguments: list[str]) -> tuple[dict[str, Row], list[str]]:
        """Return the experiments that the first arguments name, and the arguments left to read."""
        return cls.load_rows(arguments[0]), arguments

    @classmethod
    def load_rows(cls, spec: str) -> dict[str, Row]:
        """Return the experiments that the verb's subject names."""
        return {"": Row(loading.load_config(spec))}

    @abc.abstractmethod
    def run(self, rows: dict[str, Row]) -> None:
        """Do what the verb does with these experiments: one, "", but for a sweep."""

    def with_config(self, config: Config) -> Self:
        """Return the same with another config's fields."""
        return replace(
            self, model=config.model, data=config.data, train=config.train, decode=config.decode
        )


@dataclass(frozen=True)
class PathCommand(abc.ABC):
    """Base of the verbs that take a folder as it is."""

    argument_name: ClassVar[str] = "a run"

    @abc.abstractmethod
    def run(self) -> None:
        """Do what the verb does."""


def translate_command(folder: Any, option: str) -> str:
    """Return a command to try a run with: on words that it knows, where we know such words."""
    translate = f"{shell_command('translate', folder.path)}{option}"
    is_embedded = folder.config.data.corpus == "number_words"
    return f"echo 'forty-two' | {translate}" if is_embedded else f"{translate} < FILE"
