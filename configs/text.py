"""The paper's base model on parallel text of your own: a template.

    transformer-jax train configs/text.py \
        --data.train train.en train.de --data.dev dev.en dev.de --data.test test.en test.de

Line n of one file belongs to line n of the other; UTF-8, plain or gzip. A GPU, and hours.
"""

from transformer_jax.config import Config

CONFIG = Config().change(
    data={
        "corpus": "text",
        # The paper's 37,000 are for 4.5 million pairs; about 8,000 suit 100,000.
        "vocab_size": 16_000,
    },
    # Without hurry on a corpus of some 100,000 pairs: an end when dev gets no better.
    train={"steps": 50_000, "patience": 10},
)
