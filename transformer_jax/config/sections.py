"""The four sections of a config, whose defaults describe the paper's base model.

A field's annotation defines its type and its range, which architectures use the field, and whether
the field may change when a run resumes or starts from the parameters of another run. The docstring
of a field is its `--help` text.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from transformer_jax.config.validation import (
    COUNT,
    MAX_COUNT,
    NUMBER,
    NUMBER_UNLESS_ZERO,
    ON_INIT_FROM,
    ON_RESUME,
    POSITIVE,
    PROBABILITY,
    ConfigSection,
    PartName,
    UsedBy,
    at_least,
    between,
)
from transformer_jax.files import URL
from transformer_jax.registry import Registry
from transformer_jax.special_tokens import BOS, PAD

# The paper limits a translation's length to the source length plus 50 (section 6.1).
MAX_EXTRA_LENGTH = 50
# For a larger exponent, the penalty of a long translation exceeds the range of float32. All scores
# would then be 0, so the shortest hypothesis would win.
MAX_ALPHA = 5
MAX_BATCH_SHAPES = 12
# By default, each number below a million occurs on at most one line of the number_words corpus.
MAX_NUMBER_WORDS_PAIRS = 500_000
# The total number of sentence pairs in the development and test sets of number_words.
HELD_OUT_PAIRS = 1500
SINUSOIDS = ("sinusoidal", "concatenated_sinusoidal")
# This package's values of `positions` that leave self-attention unchanged.
ADDED_POSITIONS = (*SINUSOIDS, "learned", "none")
RELATIVE_POSITIONS = ("alibi", "rotary", "relative", "t5")
FUSED = ("blockwise", "cudnn")
GATED = ("swiglu", "geglu")
DOT_PRODUCTS = ("scaled_dot_product", "dot_product")
# The schedules that do not depend on the number of steps.
LASTING_SCHEDULES = ("inverse_square_root", "constant")
DECAYING_SCHEDULES = ("cosine", "warmup_stable_decay")


@dataclass(frozen=True)
class ModelConfig(ConfigSection):
    """The model architecture (section 3)."""

    architecture: Annotated[str, PartName("transformer", "rnn", "conv")] = "transformer"
    """The type of encoder and decoder. `rnn` and `conv` differ from the paper, because they use
    layers that the Transformer replaced. `rnn` uses recurrent layers (Bahdanau et al., Luong et
    al.), and `conv` uses gated convolutions (Gehring et al.)."""
    num_layers: Annotated[int, between(1, 1000)] = 6
    """Number of layers in each stack (encoder and decoder): the paper's N."""
    num_decoder_layers: Annotated[int | None, between(1, 1000), UsedBy("transformer")] = None
    """Number of layers in the decoder. Default: model.num_layers. With a value other than
    model.num_layers, the model differs from the paper's."""
    d_model: Annotated[int, between(1, 1_000_000)] = 512
    """Width of the embeddings and of every sub-layer's output."""
    d_ff: Annotated[int, between(1, 1_000_000), UsedBy("transformer")] = 2048
    """Inner width of the feed-forward networks."""
    feed_forward: Annotated[str, PartName("mlp", *GATED), UsedBy("transformer")] = "mlp"
    """The feed-forward network (section 3.3). `mlp`, as in the paper, has two linear layers.
    `swiglu` and `geglu` (Shazeer), which differ from the paper, multiply the activation by a third
    linear layer. Shazeer reduces d_ff by a third to keep the number of parameters, and omits the
    biases."""
    feed_forward_bias: Annotated[bool, UsedBy("transformer")] = True
    """Add biases to the linear layers of the feed-forward networks. Without biases, the model
    differs from the paper's."""
    activation: Annotated[str, PartName("relu", "gelu", "swish"), UsedBy("transformer")] = "relu"
    """For the `mlp` feed-forward network: the activation function between its two linear layers.
    `gelu` (exact, not the tanh approximation) and `swish` differ from the paper."""
    num_heads: Annotated[int, between(1, 1_000_000), UsedBy("transformer")] = 8
    """Number of attention heads: the paper's h."""
    num_kv_heads: Annotated[int | None, between(1, 1_000_000), UsedBy("transformer")] = None
    """Number of heads of keys and values. Default: model.num_heads. With fewer heads, groups of
    consecutive query heads share keys and values, which makes decoding caches smaller and differs
    from the paper. A value of 1 is multi-query attention (Shazeer), and other values are
    grouped-query attention (Ainslie et al.)."""
    query_key_norm: Annotated[bool, UsedBy("transformer")] = False
    """Divide each query and key by its root mean square, and multiply it by a learned vector that
    all heads share. Differs from the paper. Henry et al. divide by the norm and learn a scalar, and
    ViT-22B (Dehghani et al.) also subtracts the mean."""
    d_k: Annotated[int, between(1, 1_000_000), UsedBy("transformer")] = 64
    """Width of the queries and keys in each head."""
    d_v: Annotated[int, between(1, 1_000_000), UsedBy("transformer")] = 64
    """Width of the values in each head."""
    dropout: Annotated[float, PROBABILITY, ON_INIT_FROM, NUMBER] = 0.1
    """Dropout rate P_drop for sub-layer outputs, and for the sums of embeddings and positional
    encodings (section 5.4)."""
    attention_dropout: Annotated[float, PROBABILITY, ON_INIT_FROM, NUMBER_UNLESS_ZERO] = 0.0
    """Dropout rate for the attention weights. With a rate above 0, training differs from the
    paper's."""
    activation_dropout: Annotated[
        float, PROBABILITY, UsedBy("transformer"), ON_INIT_FROM, NUMBER_UNLESS_ZERO
    ] = 0.0
    """Dropout rate inside the feed-forward networks. With a rate above 0, training differs from the
    paper's."""
    positions: Annotated[
        str, PartName(*ADDED_POSITIONS, *RELATIVE_POSITIONS), UsedBy("transformer", "conv")
    ] = "sinusoidal"
    """How positions are encoded (section 3.5). `sinusoidal` is the paper's choice, and `learned` is
    row E of Table 3. All other choices differ from the paper. `concatenated_sinusoidal` puts all
    sines before all cosines, as in Tensor2Tensor. `none` does not encode positions. `alibi`,
    `rotary`, `relative` (Shaw et al.), and `t5` (Raffel et al.) work inside self-attention."""
    max_relative_position: Annotated[int, between(1, 1_000_000), UsedBy("transformer")] = 16
    """For `relative` positions: the maximum distance (k in Shaw et al.). Longer distances are
    clipped to this maximum."""
    position_buckets: Annotated[int, between(4, 64), UsedBy("transformer")] = 32
    """For `t5` positions: the number of distance buckets, each with a learned bias per head."""
    attention_score: Annotated[str, PartName(*DOT_PRODUCTS, "general", "additive", "none")] = (
        "scaled_dot_product"
    )
    """How queries are compared with keys (section 3.2.1). All choices except `scaled_dot_product`
    differ from the paper. `dot_product` is q^T k, `general` is q^T W k (Luong et al.), and
    `additive` is v^T tanh(q + k) (Bahdanau et al.). `none`, which only `rnn` supports, disables
    attention."""
    attention_implementation: Annotated[str, PartName("full", *FUSED), UsedBy("transformer")] = (
        "full"
    )
    """How attention is computed. `full` stores all attention weights at once. `blockwise` uses less
    memory; for sequences of 1,000 tokens or more, it is faster on a CPU but slower on TPUs and
    GPUs. `cudnn` is cuDNN's flash attention on NVIDIA GPUs."""
    attention_window: Annotated[int | None, between(1, 1_000_000), UsedBy("transformer")] = None
    """Maximum distance w between a query and a key in self-attention, which gives a neighborhood of
    size r = 2 w + 1 (section 4). Differs from the paper, which suggests this limit as future
    work."""
    attention_bias: Annotated[bool, UsedBy("transformer")] = False
    """Add biases to the four attention projections. Differs from the paper, whose projections have
    no biases."""
    output_bias: Annotated[bool, UsedBy("transformer")] = False
    """Add a per-token bias to the logits. Differs from the paper, which does not add a bias to the
    logits."""
    decoder_start: Literal["bos", "padding"] = "bos"
    """The first token that the decoder reads. With `padding`, which differs from the paper, the
    decoder starts with the padding token, as in Marian, and translations never contain that
    token."""
    norm: Annotated[str, PartName("layer_norm", "rms_norm"), UsedBy("transformer")] = "layer_norm"
    """How vectors are normalized (section 3.1). `rms_norm` (Zhang and Sennrich), which differs from
    the paper, divides by the root mean square, but neither subtracts the mean nor adds a bias."""
    layer_norm: Annotated[str, PartName("post", "pre"), UsedBy("transformer")] = "post"
    """`post` normalizes after each residual sum, as in the paper (section 3.1). `pre`, which
    differs from the paper, normalizes before each sub-layer and at the end of each stack."""
    layer_norm_epsilon: Annotated[float, POSITIVE, UsedBy("transformer")] = 1e-6
    """Constant added to the variance in layer normalization, or to the mean square in `rms_norm`.
    The paper does not specify this constant."""
    # The names of the parameters determine which matrices are shared.
    tie_embeddings: Annotated[Literal["all", "target", "none"], ON_INIT_FROM] = "all"
    """Which embedding matrices are shared (section 3.4). With `all`, the source embedding (unless
    data.source_vocab_size is set), the target embedding, and the output projection share a matrix.
    With `target`, only the target embedding and the output projection share a matrix. `target` and
    `none` differ from the paper."""
    max_positions: Annotated[
        int | None, between(1, 1_000_000), UsedBy("transformer", "conv"), ON_INIT_FROM
    ] = None
    """For `learned` positions: the number of positions in each table. Default: model.max_length in
    the encoder, and 50 more in the decoder."""
    out_of_range_positions: Annotated[
        Literal["error", "clamp"], UsedBy("transformer", "conv"), ON_INIT_FROM
    ] = "error"
    """For `learned` positions: how to handle positions past the end of the table. `error` rejects a
    source that is longer than the table, and ends a translation at the last position. `clamp`,
    which differs from the paper, uses the table's last vector for all later positions."""
    learned_positions_init: Annotated[
        Literal["normal", "sinusoidal_scale", "sinusoids"],
        UsedBy("transformer", "conv"),
        ON_INIT_FROM,
    ] = "normal"
    """For `learned` positions: the initial table, which the paper does not specify. `normal` draws
    from N(0, 1/d_model), so vectors have a norm of about 1. `sinusoidal_scale` draws from N(0,
    1/2), so vectors have a norm of about sqrt(d_model / 2), like sinusoidal encodings. `sinusoids`
    initializes the table with the sinusoidal encodings."""
    max_length: Annotated[int, between(1, 1_000_000), ON_INIT_FROM] = 256
    """Maximum source length in tokens, including the end-of-sentence token. Translation rejects or
    truncates a longer source."""
    dtype: Annotated[Literal["float32", "bfloat16", "float64"], ON_INIT_FROM] = "float32"
    """Data type of the computation. With `bfloat16`, parameters, softmax, and loss still use
    float32. By default, JAX multiplies float32 matrices in TF32 on recent NVIDIA GPUs and in
    bfloat16 on TPUs; the environment variable JAX_DEFAULT_MATMUL_PRECISION changes this. Use
    `float64` only to verify results in Python, in a jax.enable_x64(True) context."""
    logits_dtype: Annotated[Literal["float32", "bfloat16"], ON_INIT_FROM] = "float32"
    """Data type of the logits in training. With `bfloat16`, which differs from the paper, each
    logit is rounded to 8 significant bits, which saves memory and time. The loss is still computed
    in float32. Evaluation and translation always use float32 logits."""
    remat: Annotated[bool, UsedBy("transformer"), ON_RESUME, ON_INIT_FROM] = False
    """Recompute each layer's activations in the backward pass, which is slower but saves memory."""
    rnn_cell: Annotated[Literal["lstm", "gru"], UsedBy("rnn")] = "lstm"
    """For the `rnn` architecture: the recurrent cell."""
    rnn_input_feeding: Annotated[bool, UsedBy("rnn")] = False
    """For the `rnn` architecture: let the decoder also read its previous output (Luong et al.)."""
    conv_kernel_width: Annotated[int, between(1, 1000), UsedBy("conv")] = 3
    """For the `conv` architecture: the number of positions that a convolution reads."""

    name = "model"

    def __post_init__(self) -> None:
        super().__post_init__()
        positions = f"with {self.positions} positions"
        is_even = self.d_model % 2 == 0
        if self.positions in SINUSOIDS:
            self.require("d_model", is_even, f"even {positions} (half sines, half cosines)")
        if self.learned_positions_init == "sinusoids":
            self.require("d_model", is_even, "even with model.learned_positions_init sinusoids")
        if self.positions == "rotary":
            rule = f"even {positions} (they rotate pairs of components)"
            self.require("d_k", self.d_k % 2 == 0, rule)
        if self.positions == "t5":
            rule = f"even {positions} (half for keys after the query)"
            self.require("position_buckets", self.position_buckets % 2 == 0, rule)
        is_possible = self.attention_score != "none" or self.architecture == "rnn"
        rule = "a score other than none, except with model.architecture rnn"
        self.require("attention_score", is_possible, rule)
        if self.architecture == "rnn":
            self.require("d_model", is_even, "even with model.architecture rnn (two directions)")
        if self.feed_forward in GATED:
            rule = f"relu, the default, with model.feed_forward {self.feed_forward}"
            self.require("activation", self.activation == "relu", f"{rule} (it has its own)")
        if self.num_kv_heads is not None:
            is_divisor = self.num_heads % self.num_kv_heads == 0
            self.require("num_kv_heads", is_divisor, f"a divisor of num_heads ({self.num_heads})")
        self._check_attention_implementation()
        if self.positions in ("rotary", "relative"):
            rule = f"{' or '.join(DOT_PRODUCTS)} {positions} (they modify a dot product)"
            self.require("attention_score", self.attention_score in DOT_PRODUCTS, rule)

    def _check_attention_implementation(self) -> None:
        for option, default in (("attention_implementation", "full"), ("attention_window", None)):
            if self.positions_replace_attention and getattr(self, option) != default:
                # Otherwise, both options would select the class for self-attention.
                self._check_allowed({"positions": ADDED_POSITIONS}, option)
        required: dict[str, tuple[object, ...]] = {}
        if self.has_fused_attention:
            required |= {"attention_score": DOT_PRODUCTS, "dtype": ("float32", "bfloat16")}
        if self.attention_implementation == "cudnn":
            required |= {"dtype": ("bfloat16",), "attention_dropout": (0,), "d_v": (self.d_k,)}
            required["d_k"] = tuple(range(8, 129, 8))
        self._check_allowed(required, "attention_implementation")
        if self.attention_window is not None:
            self._check_allowed({"attention_implementation": ("full",)}, "attention_window")

    def _check_allowed(self, required: Mapping[str, tuple[object, ...]], option: str) -> None:
        for key, allowed in required.items():
            values = "a multiple of 8 up to 128" if key == "d_k" else " or ".join(map(str, allowed))
            rule = f"{values} with model.{option} {getattr(self, option)}"
            self.require(key, getattr(self, key) in allowed, rule)

    @property
    def key_value_heads(self) -> int:
        """The number of heads of keys and values."""
        return self.num_kv_heads or self.num_heads

    @property
    def positions_replace_attention(self) -> bool:
        """Whether the position scheme has its own self-attention, which encodes the positions."""
        if self.positions in (*ADDED_POSITIONS, *RELATIVE_POSITIONS):
            return self.positions in RELATIVE_POSITIONS
        scheme = Registry[object]("model.positions")[self.positions]
        return getattr(scheme, "self_attention", None) is not None

    @property
    def layers_per_stack(self) -> tuple[int, int]:
        """The number of layers in the encoder and in the decoder."""
        return self.num_layers, self.num_decoder_layers or self.num_layers

    @property
    def has_fused_attention(self) -> bool:
        """Whether attention computes the same result as `full`, but without storing all weights."""
        return self.attention_implementation in FUSED

    @property
    def decoder_start_id(self) -> int:
        """The ID of the first token that the decoder reads."""
        return {"bos": BOS, "padding": PAD}[self.decoder_start]

    @property
    def max_positions_per_stack(self) -> tuple[int, int]:
        """The number of learned positions in the encoder and in the decoder."""
        if self.max_positions is not None:
            return self.max_positions, self.max_positions
        return self.max_length, self.max_length + MAX_EXTRA_LENGTH

    @property
    def max_lengths(self) -> tuple[int, int | None]:
        """The maximum source and target lengths in tokens. None means no limit on the target."""
        if self.positions != "learned" or self.out_of_range_positions == "clamp":
            return self.max_length, None
        source, target = self.max_positions_per_stack
        return min(self.max_length, source), target


@dataclass(frozen=True)
class DataConfig(ConfigSection):
    """The corpus, its vocabulary, and its batches (section 5.1)."""

    corpus: Annotated[str, PartName("number_words", "text", "tfds", "trees")] = "number_words"
    """The source of the sentence pairs. `number_words`: numbers spelled out in English and German,
    generated on the fly. `text`: your own files. `tfds`: a dataset from TensorFlow Datasets,
    downloaded on first use. `trees`: sentences and their linearized trees, from a treebank (section
    6.3)."""
    task: Annotated[str, PartName("translation", "parsing")] = "translation"
    """The type of task, which determines the scores that the evaluate command reports in addition
    to BLEU and chrF. For `parsing`, the command also reports the labeled precision, recall, and F1
    of linearized trees according to evalb's rules."""
    num_pairs: Annotated[int, between(1, MAX_NUMBER_WORDS_PAIRS)] = 20_000
    """For `number_words`: the number of training pairs."""
    max_numbers_per_line: Annotated[int, between(1, 300)] = 1
    """For `number_words`: each line contains 1 to N numbers, separated by semicolons."""
    max_digits: Annotated[int | None, between(5, 6)] = None
    """For `number_words`: numbers have 1 to N digits (N is 5 or 6), and all digit counts are
    equally likely in training. The test and development lines never occur in training. If each line
    contains one number, training repeats short numbers. Default: all numbers below a million are
    equally likely, so 90% of them have six digits."""
    # When a run resumes, the files may have moved, but their text must be the same.
    train: Annotated[tuple[str, str] | None, ON_RESUME] = None
    """For `text`: the source file and target file of the training set (UTF-8, plain or compressed
    with gzip, xz, or bzip2). Line n of the target file is the translation of line n of the source
    file."""
    dev: Annotated[tuple[str, str] | None, ON_RESUME] = None
    """For `text`: the development set, in the same format as data.train. Training evaluates the
    model on this set."""
    test: Annotated[tuple[str, str] | None, ON_RESUME] = None
    """For `text`: the test set, in the same format as data.train. Training does not evaluate the
    model on this set."""
    folder: Annotated[str | None, ON_RESUME] = None
    """For `text`: the folder that file names are relative to. Default: $TRANSFORMER_JAX_DATA or, if
    that variable is not set, the working directory. For `trees`: the treebank's folder, which has
    the same default. For `tfds`: the data folder for TensorFlow Datasets."""
    dataset: str = "wmt14_translate/de-en"
    """For `tfds`: the name of the dataset."""
    languages: tuple[str, str] = ("en", "de")
    """For `tfds`: the source and target languages."""
    vocab_size: Annotated[int, between(8, 1_000_000)] = 37_000
    """Number of tokens in the vocabulary shared by source and target. If the corpus yields fewer
    tokens, the train command prints and stores the actual number."""
    source_vocab_size: Annotated[int | None, between(8, 1_000_000)] = None
    """Number of tokens in a separate source vocabulary, for languages with different scripts.
    data.vocab_size is then the size of the target vocabulary. Differs from the paper, because
    source and target then have separate embeddings."""
    target_tokens: Literal["subwords", "words"] = "subwords"
    """The kind of token in the target vocabulary, if data.source_vocab_size is set. With `words`,
    the tokens are the most frequent words in the targets, which differs from the paper. Use `words`
    for targets that consist of symbols, such as linearized trees."""
    normalization: Literal["none", "spaces", "nfc", "nfkc"] = "none"
    """How text is normalized before it is split into tokens. With `spaces`, every whitespace
    character becomes a space, and invisible characters, such as the zero-width space, are removed.
    `nfc` also combines letters with their accents. `nfkc` (SentencePiece's nmt_nfkc) replaces
    invisible characters with spaces, and it also replaces ligatures, full-width letters, and
    similar characters. The vocabulary and its exports contain the rules, so the rules apply to all
    text, and translations are normalized. All choices except `none` differ from the paper."""
    bleu_tokenizer: Annotated[
        Literal["auto", "13a", "none", "intl", "char", "zh", "ja-mecab", "ko-mecab"], ON_RESUME
    ] = "auto"
    """How sacreBLEU splits text into words. `none` is for text that is already tokenized. `auto` is
    `none` for `trees` and `char` for `number_words` (where a target is often a single word). For
    other text, the references determine `auto`: `zh` for Chinese, `char` for other scripts without
    spaces, such as Japanese and Thai, and `13a` otherwise. `ja-mecab` and `ko-mecab` need
    sacrebleu[ja] and sacrebleu[ko]."""
    bpe_dropout: Annotated[float, PROBABILITY] = 0.0
    """Probability of skipping each merge when training text is split into subwords (BPE-dropout;
    Provilkov et al. 2020 use 0.1). Values above 0 differ from the paper."""
    bpe_dropout_samples: Annotated[int, between(1, 1000)] = 10
    """With data.bpe_dropout above 0, the number of times that the training text is split at random.
    An epoch then reads the text this many times."""
    max_length: Annotated[int, COUNT] = 256
    """Maximum number of tokens in a source or target, including the end-of-sentence token. Training
    skips longer pairs."""
    max_ratio: Annotated[float, at_least(1)] = 9.0
    """Maximum ratio of the longer side of a pair to the shorter side, in tokens. Training skips
    pairs with a higher ratio, because the two sides are rarely translations of each other."""
    batch_tokens: Annotated[int, COUNT] = 25_000
    """The size of a batch across all devices: the approximate number of tokens on each side (source
    and target), including padding."""
    max_batch_shapes: Annotated[int | None, between(1, MAX_BATCH_SHAPES)] = None
    """Maximum number of batch shapes. XLA compiles a training step for each shape. Fewer shapes
    take less time to compile but need more padding. Default: the number that minimizes the expected
    training time, given train.steps, data.batch_tokens, and the model's size. A run keeps the
    number that it started with."""

    name = "data"

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("train", "dev", "test"):
            is_allowed = self.corpus == "text" or getattr(self, key) is None
            rule = f"unset with data.corpus {self.corpus} (only text reads files)"
            self.require(key, is_allowed, rule)
        for key in ("train", "dev", "test", "folder"):
            value = getattr(self, key) or ()
            is_local = not any(map(URL.match, [value] if isinstance(value, str) else value))
            self.require(key, is_local, "a local path, not a URL (mount it, or copy its files)")
        has_units = self.target_tokens == "subwords" or self.source_vocab_size is not None
        rule = "subwords without data.source_vocab_size (a shared vocabulary has one kind of token)"
        self.require("target_tokens", has_units, rule)
        rule = "0 with data.target_tokens words, which has no merges to skip"
        has_merges = self.bpe_dropout == 0 or self.target_tokens == "subwords"
        self.require("bpe_dropout", has_merges, rule)
        limit = MAX_NUMBER_WORDS_PAIRS // self.max_numbers_per_line
        reason = f"{MAX_NUMBER_WORDS_PAIRS} / data.max_numbers_per_line"
        if self.max_digits is not None and self.max_numbers_per_line > 1:
            # All lines, including held-out lines, are distinct. At most a quarter of all numbers
            # with up to max_digits digits may appear alone on a line.
            distinct = 10**self.max_digits // 4 * self.max_numbers_per_line - HELD_OUT_PAIRS
            if distinct < limit:
                limit = distinct
                reason = f"data.max_numbers_per_line x 10^data.max_digits / 4 - {HELD_OUT_PAIRS}"
        self.require("num_pairs", self.num_pairs <= limit, f"at most {reason} ({limit})")


@dataclass(frozen=True)
class TrainConfig(ConfigSection):
    """The training procedure (sections 5.2 to 5.4)."""

    steps: Annotated[int, COUNT, ON_RESUME] = 100_000
    """Number of training steps, including steps that are skipped because the loss or gradient is
    not finite."""
    warmup_steps: Annotated[int, COUNT, NUMBER] = 4000
    """Number of steps during which the learning rate rises linearly (section 5.3)."""
    learning_rate_scale: Annotated[float, POSITIVE, NUMBER] = 1.0
    """Multiplier for the paper's learning rate, which peaks at (model.d_model x
    train.warmup_steps)^-0.5 (section 5.3)."""
    peak_learning_rate: Annotated[float | None, POSITIVE, NUMBER] = None
    """The peak learning rate, which replaces train.learning_rate_scale. Differs from the paper."""
    base_width: Annotated[int | None, between(1, 1_000_000)] = None
    """The model.d_model for which the learning rate was tuned. Other widths then use the maximal
    update parametrization (muP, Yang et al. 2022), so that the same train.learning_rate_scale or
    train.peak_learning_rate also works for these widths. Keep d_ff and num_heads x d_v proportional
    to d_model. Differs from the paper, in which all parameters have the same learning rate. For
    `adam`, `adamw`, and `lion`."""
    base_d_k: Annotated[int | None, between(1, 1_000_000)] = None
    """With train.base_width: the model.d_k of the model of that width. Default:
    model.d_k x train.base_width / model.d_model, as if wider models had wider
    heads. If they have more heads instead, set this to model.d_k."""
    schedule: Annotated[str, PartName(*LASTING_SCHEDULES, *DECAYING_SCHEDULES)] = (
        "inverse_square_root"
    )
    """The learning rate after the warmup. `inverse_square_root` is the paper's schedule. The other
    schedules differ from the paper: `constant` stays at the peak, `cosine` (Loshchilov and Hutter
    2017) decays to 0, and `warmup_stable_decay` (Hu et al. 2024) first stays at the peak and then
    decays linearly to 0."""
    decay_steps: Annotated[int | None, COUNT, NUMBER] = None
    """The step at which `cosine` and `warmup_stable_decay` reach 0. Default: train.steps, which
    then cannot change when the run resumes."""
    decay_fraction: Annotated[float, PROBABILITY, NUMBER] = 0.2
    """The fraction of train.decay_steps during which `warmup_stable_decay` decays (Haegele et al.
    2024)."""
    optimizer: Annotated[
        str, PartName("adam", "adamw", "lion", "adafactor", "muon", "schedule_free")
    ] = "adam"
    """The optimizer. `adam` is the paper's optimizer. The other optimizers differ from the paper:
    `adamw` (Loshchilov and Hutter 2019), `lion` (Chen et al. 2023), `adafactor` (Shazeer and Stern
    2018; its learning rate is relative to the size of each parameter), `muon` (Jordan et al. 2024;
    it uses Adam for embeddings, norms, and biases), and `schedule_free` (Defazio et al. 2024),
    which needs the `constant` schedule and evaluates an average of the parameters. `lion` and
    `adafactor` do not use train.adam_beta1, train.adam_beta2, and train.adam_epsilon. `muon` does
    not use them for matrices."""
    weight_decay: Annotated[float, at_least(0), NUMBER_UNLESS_ZERO] = 0.0
    """Each step also shrinks each matrix by a fraction of its values: the learning rate times this
    number. Embeddings, norms, and biases do not decay. Values above 0 differ from the paper."""
    adam_beta1: Annotated[float, PROBABILITY, NUMBER] = 0.9
    """Decay rate of Adam's first moment, the mean of the gradients."""
    adam_beta2: Annotated[float, PROBABILITY, NUMBER] = 0.98
    """Decay rate of Adam's second moment, the mean of squared gradients."""
    adam_epsilon: Annotated[float, POSITIVE, NUMBER] = 1e-9
    """Constant added to the square root of Adam's second moment."""
    clip_norm: Annotated[float | None, POSITIVE, NUMBER] = None
    """Maximum global norm of the gradients. Differs from the paper, which does not mention
    clipping."""
    ema_decay: Annotated[float | None, PROBABILITY, NUMBER] = None
    """Evaluate an exponential moving average of the parameters. Each step multiplies the average by
    this number, such as 0.999, but in step t at most by (1 + t) / (10 + t), as in TensorFlow.
    Therefore, the initial parameters have little weight. Differs from the paper, which averages
    checkpoints (decode.average_checkpoints)."""
    loss: Annotated[str, PartName("cross_entropy")] = "cross_entropy"
    """The loss that training minimizes. `cross_entropy` uses train.label_smoothing and
    train.z_loss."""
    z_loss: Annotated[float, at_least(0), NUMBER_UNLESS_ZERO] = 0.0
    """Coefficient of an additional loss per token, the square of the logarithm of the softmax
    denominator, which keeps logits small. PaLM (Chowdhery et al. 2022) uses 1e-4. Values above 0
    differ from the paper."""
    label_smoothing: Annotated[float, PROBABILITY, NUMBER] = 0.1
    """Fraction of the target probability that is spread over the vocabulary (section 5.4)."""
    label_smoothing_over: Literal["vocabulary", "other_tokens"] = "vocabulary"
    """How the fraction train.label_smoothing is divided among tokens. With `vocabulary`, each of
    the V tokens, including the true token, gets a share of 1/V. With `other_tokens`, each token
    except the true one gets a share of 1/(V-1), as in Tensor2Tensor. The paper does not specify
    which variant it uses."""
    # When a run resumes, this field and `parallelism` affect only the dropout masks.
    gradient_accumulation_steps: Annotated[int, between(1, 10_000), ON_RESUME] = 1
    """Split each batch into this many micro-batches to save memory. Each micro-batch uses its own
    dropout masks."""
    parallelism: Annotated[Literal["data", "fsdp", "pmap"], ON_RESUME] = "data"
    """How multiple devices share the work. With `data`, each device holds all parameters and
    processes part of the batch. `fsdp` saves memory: between steps, each device holds only part of
    the parameters and optimizer state. `pmap` is like `data`, but it uses jax.pmap."""
    reduction_dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type for summing gradients across devices. bfloat16 halves the amount of data sent, but
    it rounds each device's gradient."""
    seed: Annotated[int, between(0, 2**31 - 1)] = 0
    """Random seed for the initial parameters, the dropout masks, and the order of the data."""
    checkpoint_every: Annotated[int, COUNT, ON_RESUME] = 1000
    """Number of steps or epochs between scheduled checkpoints. At each scheduled checkpoint,
    training computes the perplexity on the development set. The paper saves a checkpoint every 10
    minutes."""
    checkpoint_unit: Annotated[Literal["step", "epoch"], ON_RESUME] = "step"
    """The unit of train.checkpoint_every."""
    bleu_every: Annotated[int, COUNT, ON_RESUME] = 1
    """At every Nth scheduled checkpoint and after the last step, also translate the development set
    and compute BLEU."""
    patience: Annotated[int | None, COUNT, ON_RESUME] = None
    """Stop early if train.patience_metric does not improve for this many consecutive scheduled
    checkpoints. Differs from the paper, which trains for a fixed number of steps."""
    patience_metric: Annotated[Literal["perplexity", "smoothed_loss"], ON_RESUME] = "perplexity"
    """The score on the development set that selects the best checkpoint. `smoothed_loss` is the
    training loss, with label smoothing but without dropout. As in fairseq, the loss is rounded to
    0.001 bits per token."""
    keep_checkpoints: Annotated[int, COUNT, ON_RESUME] = 20
    """Number of recent scheduled checkpoints to keep for averaging. The best checkpoint, which has
    the lowest train.patience_metric, is always kept."""
    max_minutes_between_checkpoints: Annotated[float, POSITIVE, ON_RESUME] = 10.0
    """Maximum number of minutes between recovery checkpoints. The first recovery checkpoint is
    saved after step 1, and the intervals then grow to this maximum."""
    log_every: Annotated[int, COUNT, ON_RESUME] = 100
    """Number of steps between reports of training metrics."""
    trackers: Annotated[tuple[str, ...], ON_RESUME] = ("tensorboard",)
    """Programs that also receive the metrics: `tensorboard`, `wandb`, `mlflow`, `aim`, or trackers
    that your own file registers."""
    profile: Annotated[int, between(0, MAX_COUNT), ON_RESUME] = 0
    """Number of steps to trace with JAX's profiler. The trace begins train.log_every steps after
    training starts or resumes. The trace is written to RUN/profile, for viewing in TensorBoard or
    Perfetto."""

    name = "train"

    def check_combinations(self) -> None:
        """Raise a ConfigError if two fields conflict."""
        rule = "1 with train.peak_learning_rate, which replaces it"
        is_single = self.peak_learning_rate is None or self.learning_rate_scale == 1
        self.require("learning_rate_scale", is_single, rule)
        rule = "None without train.base_width"
        self.require("base_d_k", self.base_width is not None or self.base_d_k is None, rule)
        if self.schedule in LASTING_SCHEDULES:
            rule = f"None with train.schedule {self.schedule}, which does not end"
            self.require("decay_steps", self.decay_steps is None, rule)
        if self.schedule in DECAYING_SCHEDULES:
            last = self.last_decay_step
            self.require("steps", self.steps <= last, f"at most train.decay_steps ({last})")
            rule = f"less than {last}, the step at which train.schedule {self.schedule} reaches 0"
            self.require("warmup_steps", self.warmup_steps < last, rule)
        if self.optimizer in ("adam", "adafactor"):
            rule = f"0 with train.optimizer {self.optimizer} (try adamw)"
            self.require("weight_decay", self.weight_decay == 0, rule)
        if self.optimizer == "schedule_free":
            rule = "constant with train.optimizer schedule_free"
            self.require("schedule", self.schedule == "constant", rule)
            rule = "above 0 with train.optimizer schedule_free"
            self.require("adam_beta1", self.adam_beta1 > 0, rule)
            rule = "None with train.optimizer schedule_free, which has its own average"
            self.require("ema_decay", self.ema_decay is None, rule)

    @property
    def last_decay_step(self) -> int:
        """The step at which a decaying schedule ends."""
        return self.steps if self.decay_steps is None else self.decay_steps

    @property
    def schedule_depends_on_steps(self) -> bool:
        """Whether a different value of `steps` could change the learning rate at each step."""
        return self.schedule not in LASTING_SCHEDULES and self.decay_steps is None


@dataclass(frozen=True)
class DecodeConfig(ConfigSection):
    """The search for the best translation (section 6.1)."""

    beam_size: Annotated[int, between(1, 1000), ON_RESUME] = 4
    """Number of hypotheses in the beam; 1 means greedy search, which does not use the length
    penalty or decode.beam_end."""
    length_penalty: Annotated[Literal["gnmt", "power"], ON_RESUME] = "gnmt"
    """The length penalty. The score of a translation is its log-probability divided by the length
    penalty. `gnmt`, as in the paper, is ((5 + length) / 6)^alpha. `power`, which differs from the
    paper, is length^alpha."""
    length_penalty_alpha: Annotated[float, between(0, MAX_ALPHA), ON_RESUME] = 0.6
    """The exponent alpha of the length penalty. 0 disables the penalty."""
    max_extra_length: Annotated[int, between(0, 10_000), ON_RESUME] = MAX_EXTRA_LENGTH
    """Maximum length of a translation: the source length plus this many tokens."""
    beam_end: Annotated[Literal["tensor2tensor", "any"], ON_RESUME] = "tensor2tensor"
    """Which hypotheses can finish at each step. With `tensor2tensor`, as in the paper's code, a
    hypothesis can finish if its end-of-sentence token is among the 2 x beam_size most likely
    continuations. With `any`, which differs from the paper's code, every hypothesis can finish at
    every step."""
    average_checkpoints: Annotated[int, COUNT, ON_RESUME] = 1
    """Translate with the mean parameters of the last N scheduled checkpoints. For Table 2, the
    paper averages 5 checkpoints of the base model and 20 of the big model. For Table 3, the paper
    does not average checkpoints."""

    name = "decode"
