"""Multi30k at a budget of minutes on one CPU core: text and training for a sweep of many runs.

    transformer-jax sweep table3 --data multi30k_small --train multi30k_small --scale tiny

Differs from the published recipe (multi30k): a smaller vocabulary and far fewer steps, with the
paper's optimiser and label smoothing.
"""

from configs.multi30k import CONFIG as MULTI30K

CONFIG = MULTI30K.change(
    data={"vocab_size": 4000, "batch_tokens": 4096, "max_length": 64},
    train={
        "steps": 1000,
        "warmup_steps": 400,
        "rate_factor": 0.5,
        "adam_epsilon": 1e-9,
        "clip_norm": None,
        "checkpoint_every": 250,
        "checkpoint_unit": "step",
        "translate_every": 4,
        "patience": None,
        "keep_checkpoints": 1,
    },
    decode={"beam_size": 4, "length_penalty": "gnmt", "alpha": 0.6, "average": 1},
)
