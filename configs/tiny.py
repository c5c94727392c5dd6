"""The paper's model in small, on the embedded corpus: minutes on a laptop.

make demo
transformer-jax train configs/tiny.py
"""

from transformer_jax.config import Config

CONFIG = Config().change(
    model={
        "num_layers": 2,
        "d_model": 128,
        "d_ff": 512,
        "num_heads": 4,
        "d_k": 32,
        "d_v": 32,
        "max_length": 64,
    },
    data={"vocab_size": 256, "max_length": 64, "batch_tokens": 2048},
    train={
        "steps": 900,
        "warmup_steps": 300,
        "rate_factor": 0.5,
        "checkpoint_every": 300,
        "log_every": 100,
    },
)
