"""Number words: train on lines with one or two numbers, and score lines with up to eight numbers.

    transformer-jax sweep experiments/positions/number_words.py --seeds 3
    python -m experiments.positions sweeps/number_words

A run takes about five minutes on one CPU core, including scoring. A line has at most 15 tokens
for each number, so every line with two numbers fits in L = 30 tokens, and every line with eight
numbers fits in 4 L = 120 tokens. Only 24 training lines with three numbers fit in L tokens.
"""

from configs.tiny import CONFIG as TINY
from transformer_jax.config import Config, Row
from transformer_jax.config.rows import with_control

L = 30
BASE = TINY.change(
    model={"d_model": 64, "d_ff": 256, "d_k": 16, "d_v": 16, "max_length": 4 * L},
    # A quarter of these pairs are short enough to train on.
    data={
        "max_digits": None,
        "num_pairs": 40_000,
        "max_numbers_per_line": 8,
        "max_length": L,
    },
    train={"steps": 2400, "warmup_steps": 200, "checkpoint_every": 200, "bleu_every": 12},
    decode={"beam_size": 1},
)


def list_schemes(base: Config) -> dict[str, Row]:
    """Return a sweep row for each position scheme, given a config whose model.max_length is 4 L.

    L is the config's data.max_length. In a learned position table, training never updates the
    vectors for positions beyond L.
    """
    learned = {"positions": "learned"}
    clamped = {"max_positions": base.data.max_length, "out_of_range_positions": "clamp"}
    changes = {
        "sinusoidal": {"positions": "sinusoidal"},
        "clamped": {**learned, **clamped},
        "learned": learned,
        "concatenated": {"positions": "concatenated_sinusoidal"},
        **{name: {"positions": name} for name in ("alibi", "rotary", "relative", "none")},
        # Sinusoids have a larger norm than the vectors in an untrained position table. These rows
        # control for this difference in norm.
        "scaled": {**learned, "learned_positions_init": "sinusoidal_scale"},
        "from_sinusoids": {**learned, "learned_positions_init": "sinusoids"},
    }
    return with_control({name: Row(base.change(model=model)) for name, model in changes.items()})


SWEEP = list_schemes(BASE)
