r"""Ideas published since 2017, one per row. The first row is the paper's base model.

    transformer-jax params configs/since2017.py
    transformer-jax sweep configs/since2017.py --scale small --data-from table3_multi30k:base \
        --train-from table3_multi30k:base --tune train.learning_rate_scale 0.1 0.3 1 3 \
        --seeds 3 --control

docs/ablations.md contains the commands and the results of smaller sweeps: some rows on captions,
and all rows on number words. The comment above each row names its source. The feed-forward networks
of `swiglu` and `geglu` have three matrices, but about as many parameters as base. All rows use
base's learning rate by default, so tune it for each row. `llama` combines the ideas from Touvron et
al. (2023) that this package implements. `winners` combines the ideas that were best in a study on
number words.

All rows except `base` and `checkpoint_average` differ from the paper.
"""

from configs.base import CONFIG as BASE

# This is two thirds of base's d_ff, as in Shazeer (2020), rounded to a multiple of 16.
GATED = {"d_ff": 1360, "feed_forward_bias": False}
PRE_RMS = {"layer_norm": "pre", "norm": "rms_norm"}
DECAY = {"optimizer": "adamw", "weight_decay": 0.1}

SWEEP = {
    "base": BASE,
    # This idea is from Wang et al. (2019, arXiv 1906.01787) and Xiong et al. (2020,
    # arXiv 2002.04745).
    "pre_norm": BASE.change(model={"layer_norm": "pre"}),
    # This idea is from Zhang and Sennrich (2019, arXiv 1910.07467).
    "rms_norm": BASE.change(model={"norm": "rms_norm"}),
    # This idea is from Shazeer (2020, arXiv 2002.05202).
    "swiglu": BASE.change(model={"feed_forward": "swiglu", **GATED}),
    "geglu": BASE.change(model={"feed_forward": "geglu", **GATED}),
    # This idea is from Su et al. (2021, arXiv 2104.09864).
    "rotary": BASE.change(model={"positions": "rotary"}),
    # This idea is from Press et al. (2022, arXiv 2108.12409).
    "alibi": BASE.change(model={"positions": "alibi"}),
    # This idea is from Raffel et al. (2020, arXiv 1910.10683).
    "t5_bias": BASE.change(model={"positions": "t5"}),
    # This idea is from Ainslie et al. (2023, arXiv 2305.13245).
    "grouped_query": BASE.change(model={"num_kv_heads": 2}),
    # This idea is from Shazeer (2019, arXiv 1911.02150).
    "multi_query": BASE.change(model={"num_kv_heads": 1}),
    # This idea is from Henry et al. (2020, arXiv 2010.04245) and Dehghani et al. (2023,
    # arXiv 2302.05442).
    "query_key_norm": BASE.change(model={"query_key_norm": True}),
    # This idea is from Raffel et al. (2020, arXiv 1910.10683) and Chowdhery et al. (2022,
    # arXiv 2204.02311). The row uses RMSNorm because layer normalization has biases, too.
    "no_biases": BASE.change(model={"norm": "rms_norm", "feed_forward_bias": False}),
    # This idea is from Loshchilov and Hutter (2019, arXiv 1711.05101).
    "adamw": BASE.change(train=DECAY),
    # This idea is from Chen et al. (2023, arXiv 2302.06675).
    "lion": BASE.change(train={"optimizer": "lion", "weight_decay": 0.1}),
    # This idea is from Jordan et al. (2024, "Muon: An optimizer for hidden layers in neural
    # networks") and Liu et al. (2025, arXiv 2502.16982).
    "muon": BASE.change(train={"optimizer": "muon", "weight_decay": 0.1}),
    # This idea is from Defazio et al. (2024, arXiv 2405.15682).
    "schedule_free": BASE.change(train={"optimizer": "schedule_free", "schedule": "constant"}),
    # This idea is from Loshchilov and Hutter (2017, arXiv 1608.03983).
    "cosine": BASE.change(train={"schedule": "cosine"}),
    # This idea is from Hu et al. (2024, arXiv 2404.06395).
    "warmup_stable_decay": BASE.change(train={"schedule": "warmup_stable_decay"}),
    # This idea is from Chowdhery et al. (2022, arXiv 2204.02311).
    "z_loss": BASE.change(train={"z_loss": 1e-4}),
    # This idea is from Provilkov et al. (2020, arXiv 1910.13267).
    "bpe_dropout": BASE.change(data={"bpe_dropout": 0.1}),
    # Polyak and Juditsky (1992) average the parameters of all steps. An exponential moving average
    # became common later; Morales-Brotons et al. (2024, arXiv 2411.18704) study it.
    "moving_average": BASE.change(train={"ema_decay": 0.999}),
    # The row averages five checkpoints, as in Table 2 of the paper.
    "checkpoint_average": BASE.change(
        train={"keep_checkpoints": 5}, decode={"average_checkpoints": 5}
    ),
    # These ideas are from Touvron et al. (2023, arXiv 2302.13971), except for the grouped queries,
    # which are from Llama 2 (Touvron et al. 2023, arXiv 2307.09288).
    "llama": BASE.change(
        model={
            "feed_forward": "swiglu",
            "positions": "rotary",
            "num_kv_heads": 2,
            **GATED,
            **PRE_RMS,
        },
        train={"schedule": "cosine", "adam_beta2": 0.95, "clip_norm": 1.0, **DECAY},
    ),
    # This row combines the best norm, feed-forward network, positions, and optimizer of the rows
    # above, according to the development set of the study on number words in docs/ablations.md.
    "winners": BASE.change(
        model={"layer_norm": "pre", "feed_forward": "swiglu", "positions": "rotary", **GATED},
        train={"optimizer": "muon", "weight_decay": 0.1},
    ),
}
