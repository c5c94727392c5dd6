"""What an experiment is: typed, frozen dataclasses whose defaults are the paper's base model.

An ablation is its difference from them (Table 3). This module imports no JAX, so a mistake in
a config is told before any device starts. Nothing here executes data: a stored config is JSON.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from transformer_jax.config.validation import (
    ConfigError,
    ConfigSection,
    at_least,
    check_field_name,
    field_names,
    integer_between,
    positive,
    probability,
)

# A translation may be this many pieces longer than its source (section 6.1).
MAX_EXTRA_LENGTH = 50


@dataclass(frozen=True)
class ModelConfig(ConfigSection):
    """The architecture (section 3)."""

    num_layers: int = 6
    """Layers in the encoder, and as many in the decoder: the paper's N."""
    d_model: int = 512
    """Width of embeddings and of every sub-layer's output."""
    d_ff: int = 2048
    """Inner width of the feed-forward networks."""
    num_heads: int = 8
    """Attention heads: the paper's h."""
    d_k: int = 64
    """Width of queries and keys, per head."""
    d_v: int = 64
    """Width of values, per head."""
    dropout: float = 0.1
    """P_drop: on each sub-layer's output and on embeddings plus positions (section 5.4)."""
    attention_dropout: float = 0.0
    """On attention weights. Differs from the paper when above 0: it has none (later code has)."""
    activation_dropout: float = 0.0
    """Inside the feed-forward network. Differs from the paper when above 0."""
    positions: Literal[
        "sinusoidal",
        "concatenated_sinusoidal",
        "learned",
        "none",
        "alibi",
        "rotary",
        "relative",
    ] = "sinusoidal"
    """How a token's place is told (section 3.5; learned is row E of Table 3). Differs from the
    paper: concatenated_sinusoidal is Tensor2Tensor's, none shows the need; alibi, rotary and
    relative (Shaw et al.) act within self-attention."""
    max_relative_position: int = 16
    """relative: distances beyond this one count as this one: their k."""
    attention_score: Literal["scaled_dot_product", "dot_product", "general", "additive"] = (
        "scaled_dot_product"
    )
    """How queries and keys are compared (section 3.2.1). Differs from the paper: dot_product does
    not scale; general is Luong's q^T W k, additive Bahdanau's v^T tanh(q + k)."""
    attention_implementation: Literal["full", "blockwise", "cudnn"] = "full"
    """How attention is computed. full holds all weights at once. blockwise needs less memory, and
    less time for sequences of 1,000 tokens or more on a CPU. cudnn is cuDNN's flash attention on
    NVIDIA GPUs."""
    attention_bias: bool = False
    """Biases in the four projections of attention. Differs from the paper when set: its formulas
    have none."""
    layer_norm: Literal["post", "pre"] = "post"
    """Where layers are normalised: after each residual sum, as in the paper (section 3.1), or
    before each sub-layer and at the end of each stack. pre differs from the paper."""
    layer_norm_epsilon: float = 1e-6
    """Added to the variance in layer normalisation; the paper does not say."""
    tie_embeddings: Literal["all", "target", "none"] = "all"
    """What shares a matrix: source pieces, target pieces and output (section 3.4; vocabularies of
    their own keep the source's apart); target pieces and output; nothing. target and none differ
    from the paper."""
    max_positions: int | None = None
    """learned: positions in each table; None for max_length in the encoder and 50 more in the
    decoder."""
    out_of_range_positions: Literal["error", "clamp"] = "error"
    """learned: what a place past the table's end does. error: a longer source is refused, and a
    translation ends there at the latest; clamp, which differs from the paper: it takes the last
    place's vector."""
    max_length: int = 256
    """Longest source, in pieces with its end. A longer one is refused or truncated in
    translation."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the computation; parameters, softmax and loss are float32 always."""
    remat: bool = False
    """Compute each layer's activations again in the backward pass: slower, less memory."""

    name = "model"
    rules = (
        *integer_between(1000, "num_layers"),
        *integer_between(1_000_000, "d_model", "d_ff", "num_heads", "d_k", "d_v", "max_length"),
        *integer_between(1_000_000, "max_relative_position", "max_positions"),
        *positive("layer_norm_epsilon"),
        *probability("dropout", "attention_dropout", "activation_dropout"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.positions in ("sinusoidal", "concatenated_sinusoidal") and self.d_model % 2:
            raise ConfigError(
                f"model.d_model must be even with {self.positions} positions "
                f"(half sines, half cosines), got {self.d_model}"
            )
        if self.positions == "rotary" and self.d_k % 2:
            raise ConfigError(
                f"model.d_k must be even with rotary positions "
                f"(pairs of components turn), got {self.d_k}"
            )
        self._check_attention_implementation()
        dot_products = ("scaled_dot_product", "dot_product")
        if self.positions in ("rotary", "relative") and self.attention_score not in dot_products:
            raise ConfigError(
                f"model.attention_score must be {' or '.join(dot_products)} with {self.positions} "
                f"positions (they are defined by it), got {self.attention_score!r}"
            )

    def _check_attention_implementation(self) -> None:
        required: dict[str, tuple[Any, ...]] = {}
        if self.attention_implementation != "full":
            required["attention_score"] = ("scaled_dot_product", "dot_product")
            required["positions"] = ("sinusoidal", "concatenated_sinusoidal", "learned", "none")
        if self.attention_implementation == "cudnn":
            required |= {"dtype": ("bfloat16",), "attention_dropout": (0,), "d_v": (self.d_k,)}
            required["d_k"] = tuple(range(8, 129, 8))
        for name, allowed in required.items():
            if getattr(self, name) not in allowed:
                values = (
                    "a multiple of 8 up to 128" if name == "d_k" else " or ".join(map(str, allowed))
                )
                raise ConfigError(
                    f"model.{name} must be {values} with model.attention_implementation "
                    f"{self.attention_implementation}, got {getattr(self, name)!r}"
                )

    @property
    def max_positions_per_stack(self) -> tuple[int, int]:
        """Positions in a learned table of the encoder, and in one of the decoder."""
        if self.max_positions is not None:
            return self.max_positions, self.max_positions
        return self.max_length, self.max_length + MAX_EXTRA_LENGTH

    @property
    def max_lengths(self) -> tuple[int, int | None]:
        """The longest source and the longest target that there is a position for; None for any."""
        if self.positions != "learned" or self.out_of_range_positions == "clamp":
            return self.max_length, None
        source, target = self.max_positions_per_stack
        return min(self.max_length, source), target


@dataclass(frozen=True)
class DataConfig(ConfigSection):
    """The text, its pieces and its batches (section 5.1)."""

    corpus: Literal["number_words", "text", "tfds"] = "number_words"
    """Where the text comes from. embedded: English and German number words, made on the spot;
    text: files of yours; tfds: a set of TensorFlow Datasets, downloaded at first use."""
    num_pairs: int = 20_000
    """embedded: training pairs."""
    max_numbers_per_line: int = 1
    """embedded: lines have 1 to so many numbers, parted by semicolons; of every length there are
    as many."""
    max_digits: int | None = None
    """embedded: each number is drawn with 1 to so many (5 or 6) digits, all equally likely; left
    out, each number below a million is as likely, and so nearly all are long."""
    train: tuple[str, str] | None = None
    """text: a file of sources and one of targets, UTF-8, plain or gzip; line n of one belongs to
    line n of the other."""
    dev: tuple[str, str] | None = None
    """text: the same for the development set, on which training is scored."""
    test: tuple[str, str] | None = None
    """text: the same for the test set; evaluation needs one."""
    folder: str | None = None
    """text: where relative names of files begin; $TRANSFORMER_JAX_DATA where it is not said, and
    the folder you stand in where neither is. tfds: its data folder."""
    dataset: str = "wmt14_translate/de-en"
    """tfds: which set."""
    languages: tuple[str, str] = ("en", "de")
    """tfds: language of the sources, language of the targets."""
    vocab_size: int = 37_000
    """Pieces of the vocabulary that source and target share. A corpus too small for it gives
    fewer, which is told; the run's own config holds the number that it has."""
    source_vocab_size: int | None = None
    """Pieces of a vocabulary of the source's own, for languages with different scripts; the other
    is the target's then. Differs from the paper when set: embeddings are no more shared."""
    bleu_tokenizer: Literal["auto", "13a", "none", "intl", "char", "zh"] = "auto"
    """How sacreBLEU parts text into words. none takes those of text that is tokenised already;
    auto is 13a, and char for the embedded corpus, where a target is often a single word."""
    max_length: int = 256
    """Training leaves out pairs of which one side has more pieces than this, its end counted."""
    max_ratio: float = 9.0
    """Training leaves out pairs of which one side has more than so many times the pieces of the
    other: they are seldom translations."""
    batch_tokens: int = 25_000
    """About this many source and this many target tokens in a batch, padding counted, on all
    devices together."""

    name = "data"
    rules = (
        *positive("max_length", "batch_tokens"),
        *at_least(1, "max_ratio"),
        ("num_pairs", lambda x: 1 <= x <= 500_000, "from 1 to 500000"),
        *integer_between(300, "max_numbers_per_line"),
        ("max_digits", lambda x: 5 <= x <= 6, "5 or 6"),
        ("vocab_size", lambda x: 8 <= x <= 1_000_000, "from 8 to 1000000"),
        ("source_vocab_size", lambda x: 8 <= x <= 1_000_000, "from 8 to 1000000"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("train", "dev", "test"):
            if self.corpus != "text" and getattr(self, key) is not None:
                raise ConfigError(
                    f"data.{key} must be left out with data.corpus {self.corpus} "
                    f"(only text reads files), got {getattr(self, key)!r}"
                )
        # No number is in two lines, and there are a million.
        most, why = 500_000 // self.max_numbers_per_line, "500000 / data.max_numbers_per_line"
        if self.max_digits is not None:
            # No line is there twice: those of one number, of the 1,500 held-out lines too, are a
            # quarter of all such numbers at most.
            different = 10**self.max_digits // 4 * self.max_numbers_per_line - 1500
            if different < most:
                most, why = (
                    different,
                    "data.max_numbers_per_line x 10^data.max_digits / 4 - 1500",
                )
        if self.num_pairs > most:
            raise ConfigError(
                f"data.num_pairs must be at most {why} ({most}), got {self.num_pairs}"
            )


@dataclass(frozen=True)
class TrainConfig(ConfigSection):
    """The training (sections 5.2 to 5.4)."""

    steps: int = 100_000
    """Updates of the parameters."""
    warmup_steps: int = 4000
    """Updates in which the learning rate grows."""
    learning_rate_scale: float = 1.0
    """Multiplies the paper's learning rate."""
    adam_beta1: float = 0.9
    """Decay of the mean of gradients."""
    adam_beta2: float = 0.98
    """Decay of the mean of squared gradients."""
    adam_epsilon: float = 1e-9
    """Added to the root of the mean of squares."""
    clip_norm: float | None = None
    """Longest gradient, as a global norm. Differs from the paper when set: it does not clip."""
    label_smoothing: float = 0.1
    """Share of the target's probability that is spread over the whole vocabulary."""
    gradient_accumulation_steps: int = 1
    """Parts in which a batch is computed one after the other, to save memory; each part draws its
    own dropout masks."""
    parallelism: Literal["data", "fsdp", "pmap"] = "data"
    """How several devices share the work. data: each holds all parameters and takes some of a
    batch's rows; fsdp: parameters and Adam's state are split over them too, to save memory; pmap:
    as data, by jax.pmap, where each device draws its own dropout masks."""
    seed: int = 0
    """Of parameters, dropout and the order of the data."""
    checkpoint_every: int = 1000
    """Steps, or epochs, from one checkpoint, with its perplexity on the development set, to the
    next."""
    checkpoint_unit: Literal["step", "epoch"] = "step"
    """What `checkpoint_every` counts."""
    bleu_every: int = 1
    """With every so many checkpoints the development set is translated and gets its BLEU too."""
    patience: int | None = None
    """End when so many checkpoints in a row have brought no better perplexity. Differs from the
    paper when set: it trains for a fixed number of steps."""
    keep_checkpoints: int = 20
    """The last so many scheduled checkpoints stay, for averaging; the best one stays too."""
    max_minutes_between_checkpoints: float = 10.0
    """Between scheduled checkpoints one is kept for recovery: after the first step, then ever more
    seldom, until there are so many minutes from one to the next."""
    log_every: int = 100
    """Steps from one line of metrics to the next."""
    profile: int = 0
    """After the first report, trace so many steps into RUN/profile, for TensorBoard or Perfetto."""

    name = "train"
    rules = (
        *positive("steps", "warmup_steps", "learning_rate_scale", "adam_epsilon", "clip_norm"),
        *positive(
            "gradient_accumulation_steps", "checkpoint_every", "keep_checkpoints", "log_every"
        ),
        *positive("bleu_every", "patience", "max_minutes_between_checkpoints"),
        *at_least(0, "profile"),
        *probability("adam_beta1", "adam_beta2", "label_smoothing"),
        ("seed", lambda x: 0 <= x < 2**31, "from 0 to 2147483647"),
    )


@dataclass(frozen=True)
class DecodeConfig(ConfigSection):
    """The search for a translation (section 6.1)."""

    beam_size: int = 4
    """Hypotheses kept in each step; 1 is greedy search."""
    length_penalty: Literal["gnmt", "power"] = "gnmt"
    """A score is the log-probability over ((5 + length) / 6)^alpha; or, which differs from the
    paper, over length^alpha."""
    length_penalty_alpha: float = 0.6
    """Strength of the length penalty; 0 is none."""
    max_extra_length: int = MAX_EXTRA_LENGTH
    """A translation has at most this many pieces more than its source."""
    average_checkpoints: int = 1
    """Translate with the mean of the last so many scheduled checkpoints. The paper: 5 for the
    base model in Table 2, 20 for the big one, none in Table 3."""

    name = "decode"
    rules = (
        *positive("beam_size", "average_checkpoints"),
        *at_least(0, "length_penalty_alpha", "max_extra_length"),
    )


@dataclass(frozen=True)
class Config:
    """One experiment. `Config()` is the paper's base model."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    decode: DecodeConfig = field(default_factory=DecodeConfig)

    def __post_init__(self) -> None:
        if self.data.max_length > self.model.max_length:
            raise ConfigError(
                f"data.max_length must be at most model.max_length "
                f"({self.model.max_length}), got {self.data.max_length}"
            )
        self._check_tables()
        if self.decode.average_checkpoints > self.train.keep_checkpoints:
            raise ConfigError(
                f"decode.average_checkpoints must be at most train.keep_checkpoints "
                f"({self.train.keep_checkpoints}), got {self.decode.average_checkpoints}"
            )

    def _check_tables(self) -> None:
        model, usual = self.model, ModelConfig()
        if model.positions != "learned":
            for key in ("max_positions", "out_of_range_positions"):
                value, default = getattr(model, key), getattr(usual, key)
                if value != default:
                    raise ConfigError(
                        f"model.{key} must be {default!r} with model.positions {model.positions} "
                        f"(only learned has tables), got {value!r}"
                    )
            return
        if model.out_of_range_positions == "clamp":
            return
        if model.max_positions is None and self.decode.max_extra_length > MAX_EXTRA_LENGTH:
            raise ConfigError(
                f"decode.max_extra_length must be at most {MAX_EXTRA_LENGTH}, where learned "
                f"positions end, got {self.decode.max_extra_length}"
            )
        if self.data.max_length > model.max_positions_per_stack[0]:
            raise ConfigError(
                f"data.max_length must be at most model.max_positions ({model.max_positions}) where "
                f"model.out_of_range_positions is error, got {self.data.max_length}"
            )

    def change(self, **sections: Mapping[str, Any]) -> Self:
        """Return this config with some fields changed: `base.change(model={"num_heads": 4})`.

        Raises:
            ConfigError: a section or field does not exist, or a value breaks its rule.
        """
        changed = {}
        for name, fields in sections.items():
            check_field_name(name, field_names(type(self)), "config")
            section = getattr(self, name)
            for key in fields:
                check_field_name(key, field_names(type(section)), name)
            changed[name] = dataclasses.replace(section, **_tuples(fields))
        return dataclasses.replace(self, **changed)

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Return the config as plain data, ready for JSON."""
        return {
            section: {k: list(v) if isinstance(v, tuple) else v for k, v in fields.items()}
            for section, fields in dataclasses.asdict(self).items()
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Return the config that `to_dict` described; fields left out have their defaults.

        Raises:
            ConfigError: as `change` does.
        """
        if not isinstance(data, Mapping) or not all(isinstance(v, Mapping) for v in data.values()):
            raise ConfigError(f"a config must be an object of sections, got {data!r}")
        for name in data:
            check_field_name(name, field_names(cls), "config")
        return cls().change(**data)

    def differences(self, other: Self) -> dict[tuple[str, str], tuple[Any, Any]]:
        """Return the fields in which another config differs: this one's value, and the other's."""
        ours, theirs = self.to_dict(), other.to_dict()
        return {
            (section, key): (value, theirs[section][key])
            for section, fields in ours.items()
            for key, value in fields.items()
            if value != theirs[section][key]
        }

    def warnings(self) -> list[str]:
        """Return what is allowed but may not be meant, a line each."""
        model = self.model
        notes: list[str] = []
        for key, width in (("d_k", model.d_k), ("d_v", model.d_v)):
            if model.num_heads * width != model.d_model:
                notes.append(
                    f"note: num_heads x {key} is {model.num_heads * width}, "
                    f"not d_model ({model.d_model})"
                )
        return notes


@dataclass(frozen=True)
class Paper:
    """What the paper says of a row of Table 3; None where it says nothing."""

    perplexity: float | None = None
    """Per word-piece on newstest2013, without label smoothing."""
    bleu: float | None = None
    """Tokenised, on newstest2013."""
    parameters: float | None = None
    """In millions."""


@dataclass(frozen=True)
class Row:
    """A row of a sweep: an experiment and, where there is one, the paper's result beside it."""

    config: Config
    paper: Paper = Paper()


def _tuples(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the same with tuples for lists: JSON knows no tuples."""
    return {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
