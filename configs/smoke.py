"""All of Table 3 in miniature, on the embedded corpus: does everything work, from rows to report?

    transformer-jax sweep table3 --data smoke --train smoke --scale tiny --seeds 2
    transformer-jax report sweeps/table3

19 minutes on two CPU cores, the report included. The models are too small, and learn for too short a
time, for the paper's differences to show.
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
