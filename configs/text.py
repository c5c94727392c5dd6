"""A template for training the paper's base model on your own parallel text.

    transformer-jax train configs/text.py \
        --data.train train.en train.de --data.dev dev.en dev.de --data.test test.en test.de

The files contain UTF-8 text and can be compressed with gzip. Line n of one file is the translation
of line n of the other. Training takes hours on a GPU.
"""

from transformer_jax.config import Config

CONFIG = Config().change(
    data={
        "corpus": "text",
        # The paper's vocabulary has 37,000 tokens for 4.5 million sentence pairs. For 100,000
        # sentence pairs, a vocabulary of 8,000 tokens is enough.
        "vocab_size": 16_000,
    },
    # For 100,000 sentence pairs, 50,000 steps are more than enough. Training stops early when the
    # perplexity on the development set no longer improves.
    train={"steps": 50_000, "patience": 10},
)
