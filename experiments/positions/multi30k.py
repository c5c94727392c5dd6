"""Multi30k: train on captions of at most 14 tokens, and score all captions.

    transformer-jax sweep experiments/positions/multi30k.py --seeds 3
    python -m experiments.positions sweeps/multi30k

Training and scoring one model takes about seven minutes on one CPU core. configs/multi30k.py
explains where to put the Multi30k files. With L = 14, 6,227 of the 29,000 pairs are short enough to
train on. Among the 2,014 dev and test captions, 65 have more than 2.5 L tokens, 20 have more than 3
L tokens, and none have more than 4 L tokens. The vocabulary is smaller than in configs/multi30k.py,
so captions contain more tokens, and each token is more frequent.
"""

from configs.multi30k import CONFIG as MULTI30K
from experiments.positions.number_words import list_schemes

L = 14
BASE = MULTI30K.change(
    model={
        "num_layers": 2,
        "d_model": 64,
        "d_ff": 256,
        "d_k": 16,
        "d_v": 16,
        "max_length": 4 * L,
    },
    data={"vocab_size": 2000, "max_length": L, "batch_tokens": 2048},
    train={
        "steps": 3000,
        "warmup_steps": 300,
        "learning_rate_scale": 0.005 * (64 * 300) ** 0.5,
        "checkpoint_every": 500,
        "checkpoint_unit": "step",
        "bleu_every": 6,
        "patience": None,
    },
    decode={"beam_size": 1, "average_checkpoints": 1},
)
SWEEP = list_schemes(BASE)
