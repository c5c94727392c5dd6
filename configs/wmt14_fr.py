"""Table 2: both models for English to French on WMT 2014 (sections 5 and 6.1).

    transformer-jax train wmt14_fr:base
    transformer-jax train wmt14_fr:big
    transformer-jax evaluate runs/wmt14_fr-big

On newstest2014, the paper reports 38.1 BLEU for the base model and 41.8 BLEU for the big model. The
paper averages the last 5 checkpoints of the base model and the last 20 of the big model. The paper
uses 36 million sentence pairs and a vocabulary of 32,000 tokens.

Differs from the paper: the dataset in TensorFlow Datasets has 41 million sentence pairs (15 GB of
text).

No model has been trained with this config yet.
"""

from configs.wmt14 import CONFIG as BASE
from configs.wmt14_big import CONFIG as BIG

DATA = {"dataset": "wmt14_translate/fr-en", "languages": ("en", "fr"), "vocab_size": 32_000}

SWEEP = {
    "base": BASE.change(data=DATA),
    # According to section 6.1, the big model for English to French uses a dropout rate of 0.1
    # instead of 0.3.
    "big": BIG.change(model={"dropout": 0.1}, data=DATA),
}
