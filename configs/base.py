"""The paper's base model on WMT 2014, English to German: the first row of Table 3.

    transformer-jax train base
    transformer-jax train base --data-from tiny

In the paper, 100,000 steps take 12 hours on 8 P100 GPUs, and the model reaches 25.8 BLEU on
newstest2013 without checkpoint averaging. To reproduce Table 2, which averages checkpoints, use the
`wmt14` config.

The first command downloads 1.7 GB through TensorFlow Datasets: Europarl v7, Common Crawl, and News
Commentary v9, which contain 4.5 million sentence pairs in total. The development set is
newstest2013, and the test set is newstest2014. The second command uses --data-from to train on the
text of the `tiny` config instead: numbers written as words.

No model has been trained with this config yet.
"""

from transformer_jax.config import Config

CONFIG = Config().change(
    data={"corpus": "tfds", "dataset": "wmt14_translate/de-en", "languages": ("en", "de")},
    # Table 3 does not use checkpoint averaging, so it is enough to keep the latest and best
    # checkpoints.
    train={"keep_checkpoints": 1},
)
