"""The paper's base model, which is the default of `Config`.

    transformer-jax train configs/base.py

Paper: 100,000 steps in 12 hours on 8 P100 GPUs; 27.3 BLEU on newstest2014 (Table 2).
This file trains on the default corpus, number words. For the paper's corpus, add --data-from wmt14.
"""

from transformer_jax.config import Config

CONFIG = Config()
