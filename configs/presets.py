"""Published recipes for the paper's models, with their differences from the paper.

    transformer-jax params configs/presets.py
    transformer-jax train configs/presets.py:t2t_v2

The `t2t` rows contain the default settings of Tensor2Tensor, the authors' code, at the time of the
paper and in later versions. The last row describes Flax's WMT example. Every row uses the same
corpus as the `base` config. In these recipes, label smoothing spreads its probability mass over all
tokens except the correct one. The comments above the rows list the features of the recipes that
this package does not support.
"""

from configs.base import CONFIG as PAPER

# The mid-2017 version of transformer_base uses batches of 4,096 tokens on each of 8 devices, and
# its attention projections have biases. This package does not support four features of this recipe:
# an all-zero embedding for BOS, a target language embedding that is added to the source, a variant
# of Adam that skips the embeddings of tokens absent from the batch, and a joint initialization of
# the query, key, and value projections as one matrix.
T2T_2017 = PAPER.change(
    model={"positions": "concatenated_sinusoidal", "attention_bias": True},
    data={"batch_tokens": 8 * 4096},
    train={"label_smoothing_over": "other_tokens"},
)
# transformer_base_v1 has no attention biases and allows translations up to 100 tokens longer than
# the source. Like this package, versions v1, v2, and v3 initialize the query, key, and value
# projections separately. These versions share the other three unsupported features of the 2017
# recipe.
T2T_V1 = T2T_2017.change(model={"attention_bias": False}, decode={"max_extra_length": 100})
# transformer_base_v2 uses pre-norm, more dropout, a higher learning rate, and a longer warmup.
T2T_V2 = T2T_V1.change(
    model={"layer_norm": "pre", "attention_dropout": 0.1, "activation_dropout": 0.1},
    train={"learning_rate_scale": 2.0, "warmup_steps": 8000},
)
# The current transformer_base of Tensor2Tensor is transformer_base_v3.
T2T_V3 = T2T_V2.change(train={"adam_beta2": 0.997})
# Flax's WMT example combines the big model's widths with the base model's dropout, and uses 32
# packed rows of 256 tokens on each of 8 devices. This package does not support two features of the
# example: an all-zero embedding for BOS, and the combination of unscaled embeddings drawn from
# N(0, 1) and logits divided by sqrt(d_model).
FLAX_WMT = PAPER.change(
    model={
        "d_model": 1024,
        "d_ff": 4096,
        "num_heads": 16,
        "positions": "concatenated_sinusoidal",
        "layer_norm": "pre",
        "attention_dropout": 0.1,
        "activation_dropout": 0.1,
        "dtype": "bfloat16",
    },
    data={"vocab_size": 32_000, "batch_tokens": 8 * 32 * 256},
    # The learning rate peaks at 0.002 instead of the paper's 1 / sqrt(d_model * warmup_steps).
    train={
        "warmup_steps": 1000,
        "learning_rate_scale": 0.002 * (1024 * 1000) ** 0.5,
        "label_smoothing_over": "other_tokens",
    },
)

SWEEP = {
    "paper": PAPER,
    "t2t_2017": T2T_2017,
    "t2t_v1": T2T_V1,
    "t2t_v2": T2T_V2,
    "t2t_v3": T2T_V3,
    "flax_wmt": FLAX_WMT,
}
