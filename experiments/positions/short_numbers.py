"""Short numbers: train on short lines with up to eight spelled-out numbers of one to six digits.

    transformer-jax sweep experiments/positions/short_numbers.py --seeds 3
    python -m experiments.positions sweeps/short_numbers

This sweep is like number_words, except that each number has one to six digits. As a result, some
lines with as many as eight numbers fit in L = 30 tokens and are used for training. Lines that are
too long for training have more tokens, but still at most eight numbers.
"""

from dataclasses import replace

from experiments.positions.number_words import SWEEP as NUMBER_WORDS

SWEEP = {
    name: replace(row, config=row.config.change(data={"max_digits": 6}))
    for name, row in NUMBER_WORDS.items()
}
