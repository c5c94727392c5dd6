"""The schema of an experiment's config. The defaults describe the paper's base model.

An ablation, such as a row of Table 3, specifies only its differences from the defaults. Stored
configs are JSON, so loading a stored config never executes code.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from transformer_jax.config.architectures import check_architecture
from transformer_jax.config.sections import (
    ADDED_POSITIONS,
    GATED,
    MAX_BATCH_SHAPES,
    MAX_EXTRA_LENGTH,
    DataConfig,
    DecodeConfig,
    ModelConfig,
    TrainConfig,
)
from transformer_jax.config.validation import (
    LARGEST,
    ConfigError,
    NamedFields,
    annotations,
    check_field_name,
    field_names,
    part_fields,
)
from transformer_jax.files import JsonObject
from transformer_jax.registry import Registry

# The paper uses 4,000 warmup steps of about 25,000 tokens each (sections 5.1 and 5.3).
PAPER_WARMUP_TOKENS = 100_000_000
MAX_WARMUP_FACTOR = 4
# The following constants describe one H100 (see docs/performance.md). On a CPU, steps take much
# longer than compilation, so more batch shapes than the chosen number can save time. With a single
# shape, every pair would be as wide as the longest one.
MIN_BATCH_SHAPES = 2
# One more shape takes about 20 s to compile, but about eight shapes are compiled concurrently.
SECONDS_PER_SHAPE = 2.5
# Starting the kernels of a step takes at least this long, such as 4.4 ms for the Multi30k recipe.
MIN_STEP_SECONDS = 4e-3
# The base model's step computes 9.4 TFLOP in 41.9 ms, excluding the time above.
FLOPS_PER_SECOND = 250e12
# If there are k shapes, about 0.7 k^-0.8 of all positions in Multi30k's batches are padding.
PADDING_FACTOR, PADDING_EXPONENT = 0.7, -0.8
# `train.base_width` allows only these values, because its scaling rules do not cover other parts.
ALLOWED_WITH_BASE_WIDTH = {
    ("train", "optimizer"): ("adam", "adamw", "lion"),
    ("model", "architecture"): ("transformer",),
    ("model", "positions"): (*ADDED_POSITIONS, "alibi", "rotary"),
    ("model", "attention_score"): ("scaled_dot_product",),
}


@dataclass(frozen=True)
class Config(NamedFields):
    """One experiment. `Config()` is the paper's base model, trained on the `number_words` corpus.

    Raises:
        ConfigError: a value violates a rule, or two fields conflict.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    decode: DecodeConfig = field(default_factory=DecodeConfig)

    def __post_init__(self) -> None:
        for key, (section_type, _) in annotations(type(self)).items():
            if not isinstance(section := getattr(self, key), section_type):
                advice = f": to change fields, call Config().change({key}=...)"
                raise ConfigError.from_field(key, f"a {section_type.__name__}", section, advice)
        model, data, decode = self.model, self.data, self.decode
        rule = "float32 or bfloat16 (float64 is for verification in Python)"
        model.require("dtype", model.dtype != "float64", rule)
        check_architecture(model)
        self.train.check_combinations()
        self._check_base_width()
        rule = f"at most model.max_length ({model.max_length})"
        data.require("max_length", data.max_length <= model.max_length, rule)
        keep = self.train.keep_checkpoints
        rule = f"at most train.keep_checkpoints ({keep})"
        decode.require("average_checkpoints", decode.average_checkpoints <= keep, rule)
        if model.positions != "learned":
            rule = f"with model.positions {model.positions} (only learned has tables)"
            for key in ("max_positions", "out_of_range_positions", "learned_positions_init"):
                default = getattr(ModelConfig, key)
                model.require(key, getattr(model, key) == default, f"{default!r} {rule}")
        elif model.out_of_range_positions == "error" and model.max_positions is None:
            is_valid = decode.max_extra_length <= MAX_EXTRA_LENGTH
            rule = f"at most {MAX_EXTRA_LENGTH}, because the table of learned positions ends there"
            decode.require("max_extra_length", is_valid, rule)
        elif model.out_of_range_positions == "error":
            limit, end = model.max_positions_per_stack[0], "with model.out_of_range_positions error"
            rule = f"at most model.max_positions ({limit}) {end}"
            data.require("max_length", data.max_length <= limit, rule)

    def _check_base_width(self) -> None:
        if self.train.base_width is None:
            return
        for (section, key), allowed in ALLOWED_WITH_BASE_WIDTH.items():
            value = getattr(getattr(self, section), key)
            rule = f"None with {section}.{key} {value} (use {' or '.join(allowed)})"
            self.train.require("base_width", value in allowed, rule)
        rule = "None with a model part from your own file (its scale with the width is unknown)"
        self.train.require("base_width", not self.model.has_foreign_part, rule)

    def __repr__(self) -> str:
        """Return Python code for the config, with only the fields that differ from the defaults."""
        changed: dict[str, dict[str, object]] = {}
        for (section, key), (value, _) in self.differences(type(self)()).items():
            changed.setdefault(section, {})[key] = value
        arguments = ", ".join(f"{section}={fields!r}" for section, fields in changed.items())
        return f"Config().change({arguments})" if changed else "Config()"

    def __str__(self) -> str:
        """Return a line for each field that differs from the paper's base model."""
        differences = self.differences(type(self)()).items()
        lines = [f"  {'.'.join(k)}: {value!r} (base: {base!r})" for k, (value, base) in differences]
        return "\n".join(["the paper's base model" + (", except" if lines else ""), *lines])

    def change(self, /, **sections: Mapping[str, object]) -> Self:
        """Return a copy with some fields changed, as in `base.change(model={"num_heads": 4})`.

        Raises:
            ConfigError: a section or field does not exist, a value violates a rule, or two fields
                conflict.
        """
        changed = {}
        for name, fields in sections.items():
            check_field_name(name, field_names(type(self)), "config")
            if not isinstance(fields, Mapping):
                raise ConfigError.from_field(name, "a dictionary of fields", fields)
            section = getattr(self, name)
            for key in fields:
                check_field_name(key, field_names(type(section)), name)
            # JSON stores tuples as lists.
            values = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
            changed[name] = section.change(**values)
        return dataclasses.replace(self, **changed)

    def to_dict(self) -> dict[str, JsonObject]:
        """Return the config as JSON-serializable data."""
        return {
            section: {k: list(v) if isinstance(v, tuple) else v for k, v in fields.items()}
            for section, fields in dataclasses.asdict(self).items()
        }

    def by_field(self) -> dict[str, Any]:
        """Return all values as JSON-serializable data, keyed by field, such as "model.d_k"."""
        sections = self.to_dict().items()
        return {f"{section}.{key}": x for section, fields in sections for key, x in fields.items()}

    def with_fields(self, values: Mapping[str, object]) -> Self:
        """Return a copy with some fields changed, as in `base.with_fields({"model.d_k": 8})`.

        Raises:
            ConfigError: a field does not exist, or a value is invalid.
        """
        sections: dict[str, dict[str, object]] = {}
        for name, value in values.items():
            section, _, key = str(name).partition(".")
            sections.setdefault(section, {})[key] = value
        return self.change(**sections)

    def with_batch_shapes(self, shapes: int | None = None) -> Self:
        """Return a copy in which `data.max_batch_shapes` is set.

        If it is not set yet, use `shapes` or, by default, the result of `choose_num_shapes`.
        """
        if self.data.max_batch_shapes is not None:
            return self
        return self.change(data={"max_batch_shapes": shapes or choose_num_shapes(self)})

    def parts(self) -> dict[str, str]:
        """Return the names of the selected parts, keyed by field, such as "model.norm"."""
        values = self.by_field()
        return {name: values[name] for name in PART_FIELDS}

    @classmethod
    def from_dict(cls, data: JsonObject) -> Self:
        """Convert the output of `to_dict` back into a config; missing fields get their defaults."""
        if not isinstance(data, Mapping) or not all(isinstance(v, Mapping) for v in data.values()):
            raise ConfigError(f"a config must be an object of sections, got {data!r}")
        return cls().change(**data)

    def differences(self, other: Self) -> dict[tuple[str, str], tuple[object, object]]:
        """Return the fields that differ, as {(section, field): (own value, other's value)}."""
        theirs = other.to_dict()
        return {
            (section, key): (value, theirs[section][key])
            for section, fields in self.to_dict().items()
            for key, value in fields.items()
            if value != theirs[section][key]
        }

    def warnings(self) -> list[str]:
        """Return a warning for each valid but unusual setting, which may be a mistake."""
        model, data, default = self.model, self.data, DataConfig()
        ignored = [
            f"note: data.corpus {data.corpus} does not use data.{name}"
            for name in ("num_pairs", "max_numbers_per_line")
            if data.corpus in ("text", "tfds", "trees")
            and getattr(data, name) != getattr(default, name)
        ]
        return ignored + [
            f"note: num_heads x {key} is {model.num_heads * width}, not d_model ({model.d_model})"
            for key, width in (("d_k", model.d_k), ("d_v", model.d_v))
            if model.architecture == "transformer" and model.num_heads * width != model.d_model
        ]

    def describe_warmup(self) -> str | None:
        """Return a warning if the warmup covers far more or far fewer tokens than the paper's.

        The warning appears if the numbers of tokens differ by more than a factor of 4. Too few
        warmup tokens can make training diverge. If the config changes the optimizer or, like the
        `tiny` config, the learning rate, there is no warning.
        """
        train, tokens = self.train, self.data.batch_tokens * self.train.warmup_steps
        factor = max(tokens / PAPER_WARMUP_TOKENS, PAPER_WARMUP_TOKENS / tokens)
        is_usual = (train.learning_rate_scale, train.peak_learning_rate) == (1, None)
        if factor <= MAX_WARMUP_FACTOR or train.optimizer != "adam" or not is_usual:
            return None
        return (
            f"warning: warmup covers {tokens / 1e6:,.1f} M tokens (data.batch_tokens "
            f"{self.data.batch_tokens:,} x train.warmup_steps {train.warmup_steps:,}), but the "
            f"paper's covers 100 M: change train.warmup_steps, or set train.learning_rate_scale"
        )


PART_FIELDS = {
    f"{section}.{key}": rule
    for section, (section_type, _) in annotations(Config).items()
    for key, rule in part_fields(section_type).items()
}
"""The rules of the fields that select parts, such as "model.norm"."""

for _field, _rule in PART_FIELDS.items():
    Registry(_field, reserved=_rule.own)
# A config can name trackers that are not registered on this machine, because only training uses
# them.
Registry("train.trackers", reserved=("tensorboard", "wandb", "mlflow", "aim"))


def choose_num_shapes(config: Config) -> int:
    """Return the number of batch shapes that minimizes the time for compilation and training.

    XLA compiles a training step for each batch shape, and more shapes need less padding. The choice
    depends only on the config, so the order of the data is the same on every machine. For
    comparison, the function assumes that training with any number of shapes processes as many
    tokens as `train.steps` batches without padding.
    """
    model, data = config.model, config.data
    attention = 2 * model.d_model * model.num_heads * (model.d_k + model.d_v)
    feed_forward = (3 if model.feed_forward in GATED else 2) * model.d_model * model.d_ff
    encoder, decoder = model.layers_per_stack
    layers = encoder * (attention + feed_forward) + decoder * (2 * attention + feed_forward)
    # An estimate of how many parameters a step multiplies by a source and by a target vector.
    multiplied = layers + model.d_model * data.vocab_size
    flops = 6 * data.batch_tokens * multiplied
    full_seconds = config.train.steps * (MIN_STEP_SECONDS + flops / FLOPS_PER_SECOND)

    def seconds(shapes: int) -> float:
        density = 1 - PADDING_FACTOR * shapes**PADDING_EXPONENT
        return SECONDS_PER_SHAPE * shapes + full_seconds / density

    return min(range(MIN_BATCH_SHAPES, MAX_BATCH_SHAPES + 1), key=seconds)


@dataclass(frozen=True)
class Paper(NamedFields):
    """The paper's results for a row of Table 3. Results that the paper omits are None."""

    perplexity: float | None = None
    """The per-token perplexity on newstest2013, without label smoothing."""
    bleu: float | None = None
    """The tokenized BLEU on newstest2013."""
    parameters: float | None = None
    """The number of parameters, in millions."""

    def __post_init__(self) -> None:
        for key, value in dataclasses.asdict(self).items():
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not (value is None or (is_number and 0 < value <= LARGEST)):
                rule = "a positive, finite number or None"
                raise ConfigError.from_field(f"the paper's {key}", rule, value)


@dataclass(frozen=True)
class Row(NamedFields):
    """A row in a sweep: an experiment and the paper's results for this experiment."""

    config: Config
    paper: Paper = Paper()
    is_control: bool = False
    """Whether this row is a copy of another row with other seeds (a true difference of 0)."""

    def __post_init__(self) -> None:
        for key, kind in (("config", Config), ("paper", Paper)):
            if not isinstance(value := getattr(self, key), kind):
                name = type(value).__name__
                raise ConfigError(f"the {key} of a row must be a {kind.__name__}, got {name}")


def is_own_search(result: Mapping[str, object], decode: DecodeConfig) -> bool:
    """Return whether a stored evaluation used this decode config.

    The evaluation must not have averaged more checkpoints than the config requests, but a short run
    may average fewer. The stored decode config contains the actual number. `result` is the content
    of a scores.json file, so its values may be of any type.
    """
    averaged = result.get("average_checkpoints")
    if not isinstance(averaged, int) or not 1 <= averaged <= decode.average_checkpoints:
        return False
    own = dataclasses.replace(decode, average_checkpoints=averaged)
    return result.get("decode") == dataclasses.asdict(own)
