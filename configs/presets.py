"""Recipes that go by the paper's name: what did each change?

    transformer-jax params configs/presets.py
    transformer-jax train configs/presets.py:t2t_v2

The code at publication and its later defaults (Tensor2Tensor), and Flax's WMT example, each on the
data of `base`. Their label smoothing leaves out the true piece; ours, as in the paper's rows, does
not. What else a recipe has and this package has not stands above it.
"""

from configs.base import CONFIG as PAPER

# transformer_base in mid-2017: 4,096 tokens on each of 8 devices; projections with biases.
# Not here: zeros as begin of a sentence, an embedding of the target's language that is added to
# the source, Adam that leaves out rows of absent pieces, query, key and value drawn as one matrix.
T2T_2017 = PAPER.change(
    model={"positions": "concatenated_sinusoidal", "attention_bias": True},
    data={"batch_tokens": 8 * 4096},
)
# transformer_base_v1: no biases; translations up to 100 pieces longer than the source.
# Not here, nor in v2 and v3: as in 2017, but for query, key and value, which are drawn apart.
T2T_V1 = T2T_2017.change(model={"attention_bias": False}, decode={"max_extra_length": 100})
# transformer_base_v2: normalises first, drops out more, learns faster and later.
T2T_V2 = T2T_V1.change(
    model={"layer_norm": "pre", "attention_dropout": 0.1, "activation_dropout": 0.1},
    train={"learning_rate_scale": 2.0, "warmup_steps": 8000},
)
# transformer_base_v3, today's transformer_base.
T2T_V3 = T2T_V2.change(train={"adam_beta2": 0.997})
# Of the big model's widths, with the base's dropout; 32 packed rows of 256 on each of 8 devices.
# Not here: embeddings from N(0, 1), not scaled, and logits over sqrt(d_model); zero as begin.
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
    # The rate peaks at 0.002: the paper's would at 1 / sqrt(d_model warmup_steps).
    train={"warmup_steps": 1000, "learning_rate_scale": 0.002 * (1024 * 1000) ** 0.5},
)

SWEEP = {
    "paper": PAPER,
    "t2t_2017": T2T_2017,
    "t2t_v1": T2T_V1,
    "t2t_v2": T2T_V2,
    "t2t_v3": T2T_V3,
    "flax_wmt": FLAX_WMT,
}
