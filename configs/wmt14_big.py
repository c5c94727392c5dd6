"""Table 2, the big model from English to German on WMT 2014 (sections 5 and 6.1).

    transformer-jax train wmt14_big
    transformer-jax evaluate runs/wmt14_big

Paper: 300,000 steps in 3.5 days on 8 P100 GPUs; 28.4 BLEU on newstest2014 with an average of the
last 20 checkpoints, which are ten minutes apart.

This config has not been trained with this code yet.
"""

from configs.big import CONFIG as BIG

CONFIG = BIG.change(
    # This is every ten minutes at the paper's 1 s per step.
    train={"checkpoint_every": 600, "keep_checkpoints": 20},
    decode={"average_checkpoints": 20},
)
