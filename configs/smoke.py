"""All rows of Table 3 on number words, at a small scale: a quick test of sweeps and reports.

    transformer-jax sweep table3 --data-from smoke --train-from smoke --scale tiny --seeds 2
    transformer-jax report sweeps/table3

Time: 19 minutes on two CPU cores, including the report. The models are too small and train for too
few steps to reproduce the paper's differences.
"""

from configs.tiny import CONFIG as TINY

CONFIG = TINY.change(
    data={"num_pairs": 4000, "batch_tokens": 1024},
    train={
        "steps": 150,
        "warmup_steps": 75,
        "learning_rate_scale": 0.3,
        "checkpoint_every": 75,
        "bleu_every": 2,
        "keep_checkpoints": 1,
        "log_every": 25,
    },
    decode={"average_checkpoints": 1},
)
