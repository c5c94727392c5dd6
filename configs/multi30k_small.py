"""A small Multi30k setup for sweeps in which each run takes minutes on one CPU core.

    M=multi30k_small
    transformer-jax sweep table3 --data-from $M --train-from $M --decode-from $M --scale tiny

Differs from the published recipe (multi30k): a smaller vocabulary, smaller batches, far fewer
steps, the paper's optimizer, and neither early stopping nor checkpoint averaging. The search is
greedy, because beam search returns translations that are too short after so few training steps (see
"When hypotheses may end" in experiments/LOG.md).
"""

from configs.multi30k import CONFIG as MULTI30K

CONFIG = MULTI30K.change(
    data={"vocab_size": 2000, "batch_tokens": 2048, "max_length": 64, "max_batch_shapes": None},
    train={
        "steps": 600,
        "warmup_steps": 200,
        "learning_rate_scale": 0.7,
        "adam_epsilon": 1e-9,
        "clip_norm": None,
        "checkpoint_every": 150,
        "checkpoint_unit": "step",
        "bleu_every": 4,
        "patience": None,
        "keep_checkpoints": 1,
        "log_every": 50,
    },
    decode={
        "beam_size": 1,
        "length_penalty": "gnmt",
        "length_penalty_alpha": 0.6,
        "average_checkpoints": 1,
    },
)
