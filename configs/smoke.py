"""All rows of Table 3 on number words, at small scale.

    transformer-jax sweep table3 --data-from smoke --train-from smoke --scale tiny --seeds 2
    transformer-jax report sweeps/table3

The sweep takes about 25 minutes on two CPU cores. The base model translates most held-out lines
correctly. The task is too easy to reproduce the differences between rows that the paper reports.
"""

from configs.tiny import CONFIG as TINY

CONFIG = TINY.change(
    data={"max_digits": None, "num_pairs": 4000, "batch_tokens": 512},
    train={
        "steps": 400,
        "warmup_steps": 100,
        "learning_rate_scale": 0.3,
        "checkpoint_every": 100,
        "bleu_every": 4,
        "keep_checkpoints": 1,
        "log_every": 25,
    },
    decode={"average_checkpoints": 1},
)
