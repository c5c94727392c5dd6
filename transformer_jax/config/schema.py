"""The schema of an experiment: frozen, typed dataclasses whose defaults are the paper's base model.

An ablation is described by its differences from these defaults (Table 3). The docstring of a field
is its help text. This module does not import JAX, so an invalid config is reported before JAX
initializes any device. A stored config is JSON, so loading it never executes code.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Self

from transformer_jax.config.validation import (
    AtLeast,
    Between,
    ConfigError,
    ConfigSection,
    Positive,
    Probability,
    check_field_name,
    field_names,
)

# The paper limits a translation to the length of its source plus 50 (section 6.1).
MAX_EXTRA_LENGTH = 50
# The number_words corpus uses each of its million numbers in at most one line.
MAX_NUMBER_WORDS_PAIRS = 500_000
# Number of sentence pairs of the number_words corpus in the development and test sets together.
HELD_OUT_PAIRS = 1500


@dataclass(frozen=True)
class ModelConfig(ConfigSection):
    """The architecture (section 3)."""

    num_layers: Annotated[int, Between(1, 1000)] = 6
    """Number of layers in the encoder and in the decoder: the paper's N."""
    d_model: Annotated[int, Between(1, 1_000_000)] = 512
    """Width of the embeddings and of the output of every sub-layer."""
    d_ff: Annotated[int, Between(1, 1_000_000)] = 2048
    """Inner width of the feed-forward networks."""
    num_heads: Annotated[int, Between(1, 1_000_000)] = 8
    """Number of attention heads: the paper's h."""
    d_k: Annotated[int, Between(1, 1_000_000)] = 64
    """Width of the queries and keys of each head."""
    d_v: Annotated[int, Between(1, 1_000_000)] = 64
    """Width of the values of each head."""
    dropout: Annotated[float, Probability()] = 0.1
    """The paper's P_drop: dropout rate for the output of each sub-layer and
    for the sums of embeddings and positions (section 5.4)."""
    attention_dropout: Annotated[float, Probability()] = 0.0
    """Dropout rate for the attention weights. Differs from the paper when
    above 0: only the authors' later code applies this dropout."""
    activation_dropout: Annotated[float, Probability()] = 0.0
    """Dropout rate inside the feed-forward networks. Differs from the paper
    when above 0."""
    positions: Literal[
        "sinusoidal",
        "concatenated_sinusoidal",
        "learned",
        "none",
        "alibi",
        "rotary",
        "relative",
    ] = "sinusoidal"
    """How positions are encoded (section 3.5). sinusoidal is the paper's
    choice; learned is row E of Table 3. The others differ from the
    paper: concatenated_sinusoidal puts all sines before all cosines, as
    in Tensor2Tensor; none encodes no positions; alibi, rotary, and
    relative (Shaw et al.) act within self-attention."""
    max_relative_position: Annotated[int, Between(1, 1_000_000)] = 16
    """With relative positions: the maximum distance, to which longer
    distances are clipped (k in Shaw et al.)."""
    attention_score: Literal["scaled_dot_product", "dot_product", "general", "additive"] = (
        "scaled_dot_product"
    )
    """How queries are compared with keys (section 3.2.1). All but
    scaled_dot_product differ from the paper: dot_product does not
    scale; general is q^T W k (Luong et al.); additive is v^T tanh(q +
    k) (Bahdanau et al.)."""
    attention_implementation: Literal["full", "blockwise", "cudnn"] = "full"
    """How attention is computed. full stores all weights at once. blockwise
    needs less memory, and is faster on a CPU for sequences of 1,000 tokens
    or more. cudnn is cuDNN's flash attention on NVIDIA GPUs."""
    attention_bias: bool = False
    """Add biases to the four projections of attention. Differs from the
    paper when set: the paper's formulas have no biases."""
    layer_norm: Literal["post", "pre"] = "post"
    """post normalizes after each residual sum, as in the paper (section
    3.1). pre, which differs from the paper, normalizes before each
    sub-layer and at the end of each stack."""
    layer_norm_epsilon: Annotated[float, Positive()] = 1e-6
    """Added to the variance in layer normalization. The paper does not
    give a value."""
    tie_embeddings: Literal["all", "target", "none"] = "all"
    """Which matrices are shared (section 3.4). all: the source embedding,
    the target embedding, and the output projection (with
    data.source_vocab_size, the source embedding is separate). target:
    the target embedding and the output projection. none: no matrices
    are shared. target and none differ from the paper."""
    max_positions: Annotated[int | None, Between(1, 1_000_000)] = None
    """With learned positions: the number of positions in each table.
    Default: model.max_length in the encoder, and 50 more in the decoder."""
    out_of_range_positions: Literal["error", "clamp"] = "error"
    """With learned positions: what happens past the end of the table.
    error rejects a longer source and ends a translation at the last
    position. clamp, which differs from the paper, reuses the last
    position."""
    max_length: Annotated[int, Between(1, 1_000_000)] = 256
    """Maximum length of a source in tokens, including the end-of-sentence
    token. Translation rejects or truncates a longer source."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of the computation. Parameters, softmax, and loss always
    use float32."""
    remat: bool = False
    """Recompute the activations of each layer in the backward pass, which
    is slower but needs less memory."""

    name = "model"

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
                f"(they rotate pairs of components), got {self.d_k}"
            )
        self._check_attention_implementation()
        dot_products = ("scaled_dot_product", "dot_product")
        if self.positions in ("rotary", "relative") and self.attention_score not in dot_products:
            raise ConfigError(
                f"model.attention_score must be {' or '.join(dot_products)} with {self.positions} "
                f"positions (their definition uses it), got {self.attention_score!r}"
            )

    def _check_attention_implementation(self) -> None:
        required: dict[str, tuple[object, ...]] = {}
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
        """Number of learned positions in the encoder and in the decoder."""
        if self.max_positions is not None:
            return self.max_positions, self.max_positions
        return self.max_length, self.max_length + MAX_EXTRA_LENGTH

    @property
    def max_lengths(self) -> tuple[int, int | None]:
        """Maximum length of a source and of a target, in tokens; None if unlimited."""
        if self.positions != "learned" or self.out_of_range_positions == "clamp":
            return self.max_length, None
        source, target = self.max_positions_per_stack
        return min(self.max_length, source), target


@dataclass(frozen=True)
class DataConfig(ConfigSection):
    """The corpus, its vocabulary, and its batches (section 5.1)."""

    corpus: Literal["number_words", "text", "tfds"] = "number_words"
    """The source of the sentence pairs. number_words: numbers in English
    and German words, generated on the fly. text: your own files. tfds:
    a dataset of TensorFlow Datasets, downloaded on first use."""
    num_pairs: Annotated[int, Between(1, MAX_NUMBER_WORDS_PAIRS)] = 20_000
    """For number_words: the number of training pairs."""
    max_numbers_per_line: Annotated[int, Between(1, 300)] = 1
    """For number_words: each line has 1 to N numbers separated by
    semicolons. All counts are equally frequent."""
    max_digits: Annotated[int | None, Between(5, 6)] = None
    """For number_words: each number has 1 to N digits (N is 5 or 6), and
    all digit counts are equally likely. Default: all numbers below a
    million are equally likely, so most are long."""
    train: tuple[str, str] | None = None
    """For text: the training set, as a file of sources and a file of
    targets, in UTF-8, plain or gzip. Line n of one file translates line n
    of the other."""
    dev: tuple[str, str] | None = None
    """For text: the development set, in the same form. Training evaluates
    the model on it."""
    test: tuple[str, str] | None = None
    """For text: the test set, in the same form. Only the evaluate command
    uses it."""
    folder: str | None = None
    """For text: the folder that relative file names refer to. Default:
    $TRANSFORMER_JAX_DATA, or else the current folder. For tfds: the data
    folder of TensorFlow Datasets."""
    dataset: str = "wmt14_translate/de-en"
    """For tfds: the name of the dataset."""
    languages: tuple[str, str] = ("en", "de")
    """For tfds: the source language and the target language."""
    vocab_size: Annotated[int, Between(8, 1_000_000)] = 37_000
    """Number of tokens in the vocabulary that source and target share. A
    corpus that is too small yields fewer tokens: training then reports
    the actual number and stores it with the run."""
    source_vocab_size: Annotated[int | None, Between(8, 1_000_000)] = None
    """Number of tokens in a separate vocabulary for the source, for
    languages with different scripts. data.vocab_size is then the size of
    the target vocabulary. Differs from the paper when set: source and
    target no longer share an embedding."""
    bleu_tokenizer: Literal["auto", "13a", "none", "intl", "char", "zh"] = "auto"
    """How sacreBLEU splits text into words. none is for text that is
    already tokenized. auto is char for number_words, where a target is
    often a single word, and 13a otherwise."""
    max_length: Annotated[int, Positive()] = 256
    """Maximum number of tokens in a source or target, including the
    end-of-sentence token. Training skips longer pairs."""
    max_ratio: Annotated[float, AtLeast(1)] = 9.0
    """Maximum ratio between the numbers of tokens in the longer and the
    shorter side of a pair. Training skips pairs with a larger ratio,
    because they are rarely translations."""
    batch_tokens: Annotated[int, Positive()] = 25_000
    """Approximate number of source tokens, and of target tokens, in a
    batch across all devices, including padding."""

    name = "data"

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("train", "dev", "test"):
            if self.corpus != "text" and getattr(self, key) is not None:
                raise ConfigError(
                    f"data.{key} must be left out with data.corpus {self.corpus} "
                    f"(only text reads files), got {getattr(self, key)!r}"
                )
        limit = MAX_NUMBER_WORDS_PAIRS // self.max_numbers_per_line
        reason = f"{MAX_NUMBER_WORDS_PAIRS} / data.max_numbers_per_line"
        if self.max_digits is not None:
            # No two lines are equal. Lines of a single number, including the held-out ones, use at
            # most a quarter of all numbers of up to max_digits digits.
            distinct = 10**self.max_digits // 4 * self.max_numbers_per_line - HELD_OUT_PAIRS
            if distinct < limit:
                limit = distinct
                reason = f"data.max_numbers_per_line x 10^data.max_digits / 4 - {HELD_OUT_PAIRS}"
        if self.num_pairs > limit:
            raise ConfigError(
                f"data.num_pairs must be at most {reason} ({limit}), got {self.num_pairs}"
            )


@dataclass(frozen=True)
class TrainConfig(ConfigSection):
    """The training (sections 5.2 to 5.4)."""

    steps: Annotated[int, Positive()] = 100_000
    """Number of parameter updates."""
    warmup_steps: Annotated[int, Positive()] = 4000
    """Number of steps during which the learning rate rises linearly
    (section 5.3)."""
    learning_rate_scale: Annotated[float, Positive()] = 1.0
    """Factor that multiplies the paper's learning rate (section 5.3)."""
    adam_beta1: Annotated[float, Probability()] = 0.9
    """Decay rate of Adam's first moment, the mean of the gradients."""
    adam_beta2: Annotated[float, Probability()] = 0.98
    """Decay rate of Adam's second moment, the mean of the squared
    gradients."""
    adam_epsilon: Annotated[float, Positive()] = 1e-9
    """Added to the square root of Adam's second moment."""
    clip_norm: Annotated[float | None, Positive()] = None
    """Maximum global norm of the gradients. Differs from the paper when
    set: the paper does not clip gradients."""
    label_smoothing: Annotated[float, Probability()] = 0.1
    """Share of the target probability that is spread over the whole
    vocabulary (section 5.4)."""
    gradient_accumulation_steps: Annotated[int, Positive()] = 1
    """Number of micro-batches into which a batch is split to save memory.
    Their gradients are summed before the update. Each micro-batch draws
    its own dropout masks."""
    parallelism: Literal["data", "fsdp", "pmap"] = "data"
    """How several devices share the work. data: each device holds all
    parameters and computes a part of the batch. fsdp: parameters and
    Adam's moments are sharded too, to save memory. pmap: like data, but
    with jax.pmap, and each device draws its own dropout masks."""
    seed: Annotated[int, Between(0, 2**31 - 1)] = 0
    """Random seed of the initial parameters, the dropout masks, and the
    order of the data."""
    checkpoint_every: Annotated[int, Positive()] = 1000
    """Number of steps or epochs between scheduled checkpoints. Each one is
    evaluated by its perplexity on the development set."""
    checkpoint_unit: Literal["step", "epoch"] = "step"
    """The unit of train.checkpoint_every."""
    bleu_every: Annotated[int, Positive()] = 1
    """At every Nth scheduled checkpoint, also translate the development
    set and compute BLEU."""
    patience: Annotated[int | None, Positive()] = None
    """Stop after this many scheduled checkpoints in a row without a better
    perplexity. Differs from the paper when set: the paper trains for a
    fixed number of steps."""
    keep_checkpoints: Annotated[int, Positive()] = 20
    """Keep this many of the latest scheduled checkpoints, for averaging.
    The best checkpoint is always kept."""
    max_minutes_between_checkpoints: Annotated[float, Positive()] = 10.0
    """Maximum time between recovery checkpoints, which training saves
    between the scheduled ones. The first follows step 1; the intervals
    then grow to this maximum."""
    log_every: Annotated[int, Positive()] = 100
    """Number of steps between reports of the training metrics."""
    profile: Annotated[int, AtLeast(0)] = 0
    """After the first report, trace this many steps and write the trace to
    RUN/profile, for TensorBoard or Perfetto."""

    name = "train"


@dataclass(frozen=True)
class DecodeConfig(ConfigSection):
    """The search for a translation (section 6.1)."""

    beam_size: Annotated[int, Positive()] = 4
    """Number of hypotheses in the beam. 1 is greedy search."""
    length_penalty: Literal["gnmt", "power"] = "gnmt"
    """The score of a translation is its log-probability divided by this
    penalty. gnmt, as in the paper: ((5 + length) / 6)^alpha. power,
    which differs from the paper: length^alpha."""
    length_penalty_alpha: Annotated[float, AtLeast(0)] = 0.6
    """The exponent alpha of the length penalty. 0 turns the penalty off."""
    max_extra_length: Annotated[int, AtLeast(0)] = MAX_EXTRA_LENGTH
    """Maximum length of a translation: the length of its source plus this
    many tokens."""
    average_checkpoints: Annotated[int, Positive()] = 1
    """Translate with the mean of the last N scheduled checkpoints. The
    paper averages 5 for the base model and 20 for the big model in
    Table 2, and does not average in Table 3."""

    name = "decode"


@dataclass(frozen=True)
class Config:
    """One experiment. `Config()` is the paper's base model.

    Raises:
        ConfigError: a value breaks a rule, or two fields contradict each other.
    """

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
        self._check_learned_positions()
        if self.decode.average_checkpoints > self.train.keep_checkpoints:
            raise ConfigError(
                f"decode.average_checkpoints must be at most train.keep_checkpoints "
                f"({self.train.keep_checkpoints}), got {self.decode.average_checkpoints}"
            )

    def _check_learned_positions(self) -> None:
        model, defaults = self.model, ModelConfig()
        if model.positions != "learned":
            for key in ("max_positions", "out_of_range_positions"):
                value, default = getattr(model, key), getattr(defaults, key)
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
                f"decode.max_extra_length must be at most {MAX_EXTRA_LENGTH}, because learned "
                f"positions end there, got {self.decode.max_extra_length}"
            )
        if self.data.max_length > model.max_positions_per_stack[0]:
            raise ConfigError(
                f"data.max_length must be at most model.max_positions ({model.max_positions}) with "
                f"model.out_of_range_positions error, got {self.data.max_length}"
            )

    def change(self, **sections: Mapping[str, Any]) -> Self:
        """Return a copy with some fields changed: `base.change(model={"num_heads": 4})`.

        Raises:
            ConfigError: a section or field does not exist, or a value breaks a rule.
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
        """Return the config as plain data that JSON can represent."""
        return {
            section: {k: list(v) if isinstance(v, tuple) else v for k, v in fields.items()}
            for section, fields in dataclasses.asdict(self).items()
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Return the config that `to_dict` returned as `data`; missing fields get their defaults.

        Raises:
            ConfigError: `data` is not an object of sections, a section or field does not exist, or
                a value breaks a rule.
        """
        if not isinstance(data, Mapping) or not all(isinstance(v, Mapping) for v in data.values()):
            raise ConfigError(f"a config must be an object of sections, got {data!r}")
        for name in data:
            check_field_name(name, field_names(cls), "config")
        return cls().change(**data)

    def differences(self, other: Self) -> dict[tuple[str, str], tuple[Any, Any]]:
        """Return the fields that differ, as (section, field): (own value, other's value)."""
        theirs = other.to_dict()
        return {
            (section, key): (value, theirs[section][key])
            for section, fields in self.to_dict().items()
            for key, value in fields.items()
            if value != theirs[section][key]
        }

    def warnings(self) -> list[str]:
        """Return one line for each valid but unusual choice, which may be a mistake."""
        model = self.model
        return [
            f"note: num_heads x {key} is {model.num_heads * width}, not d_model ({model.d_model})"
            for key, width in (("d_k", model.d_k), ("d_v", model.d_v))
            if model.num_heads * width != model.d_model
        ]


@dataclass(frozen=True)
class Paper:
    """The results that the paper gives for a row of Table 3; None for a result that it omits."""

    perplexity: float | None = None
    """Per-token perplexity on newstest2013, without label smoothing."""
    bleu: float | None = None
    """Tokenized BLEU on newstest2013."""
    parameters: float | None = None
    """Number of parameters, in millions."""


@dataclass(frozen=True)
class Row:
    """A row of a sweep: an experiment and the paper's results for it."""

    config: Config
    paper: Paper = Paper()


def _tuples(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Convert lists to tuples, because JSON has no tuples."""
    return {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
