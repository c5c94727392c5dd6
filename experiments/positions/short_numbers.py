"""Numbers of every length: trained on lines that are short, with up to eight numbers in them.

    transformer-jax sweep experiments/positions/short_numbers.py --seeds 3
    python -m experiments.positions sweeps/short_numbers

As number_words, but a number has from one to six digits, so that training sees lines of up to eight
numbers within L = 30 pieces: what is new in a longer line is its length, and not the count.
"""

from experiments.positions.number_words import SWEEP as NUMBER_WORDS
from transformer_jax.config import Row

SWEEP = {
    name: Row(row.config.change(data={"digits_per_number": 6}))
    for name, row in NUMBER_WORDS.items()
}
