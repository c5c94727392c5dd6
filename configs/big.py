"""The paper's big model on WMT 2014, English to German: the last row of Table 3.

    transformer-jax train big

In the paper, 300,000 steps take 3.5 days on 8 P100 GPUs, and the model reaches 26.4 BLEU on
newstest2013 without checkpoint averaging. To reproduce Table 2, which averages checkpoints, use the
`wmt14_big` config.

No model has been trained with this config yet.
"""

from configs.base import CONFIG as BASE

CONFIG = BASE.change(
    model={"d_model": 1024, "d_ff": 4096, "num_heads": 16, "dropout": 0.3},
    train={"steps": 300_000},
)
