"""The paper's experiment: the base model on WMT 2014, English to German (sections 5 and 6.1).

    transformer-jax prepare configs/wmt14.py
    transformer-jax train configs/wmt14.py
    transformer-jax evaluate runs/wmt14

Paper: 100,000 steps in 12 hours on 8 P100 GPUs; 27.3 BLEU on newstest2014 with an average of the
last 5 checkpoints (Table 2), and 25.8 on newstest2013 without averaging (Table 3). This config has
not been trained with this code yet.

The first command downloads 1.7 GB with TensorFlow Datasets: Europarl v7, Common Crawl, and News
Commentary v9, with 4.5 million pairs in total. The development set is newstest2013, and the test
set is newstest2014.
"""

from configs.base import CONFIG as BASE

CONFIG = BASE.change(
    data={
        "corpus": "tfds",
        "dataset": "wmt14_translate/de-en",
        "languages": ("en", "de"),
        "vocab_size": 37_000,
        "batch_tokens": 25_000,
    },
    # At the paper's 0.4 s per step, this saves a checkpoint every ten minutes.
    train={"checkpoint_every": 1500},
    decode={"average_checkpoints": 5, "beam_size": 4, "length_penalty_alpha": 0.6},
)
