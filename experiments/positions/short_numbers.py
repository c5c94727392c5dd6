"""Numbers of every length: trained on lines that are short, with up to eight numbers in them.

    transformer-jax sweep experiments/positions/short_numbers.py --seeds 3
    python -m experiments.positions sweeps/short_numbers

As number_words, but each number is drawn with one to six digits, so that training sees lines of up
to eight numbers within L = 30 pieces, if few: what is new in most longer lines is their length, and
not their count.
"""

from experiments.positions.number_words import SWEEP as NUMBER_WORDS
from transformer_jax.config import Row

SWEEP = {name: Row(row.config.change(data={"max_digits": 6})) for name, row in NUMBER_WORDS.items()}
