"""The paper's big model (last row of Table 3).

    transformer-jax train configs/big.py

Paper: 300,000 steps in 3.5 days on 8 P100 GPUs; 28.4 BLEU on newstest2014 (Table 2).
This file trains on the default corpus, number words. For the paper's corpus, add --data-from wmt14.
"""

from configs.base import CONFIG as BASE

CONFIG = BASE.change(
    model={"d_model": 1024, "d_ff": 4096, "num_heads": 16, "dropout": 0.3},
    train={"steps": 300_000},
)
