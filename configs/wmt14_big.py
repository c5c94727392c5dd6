"""Table 2: the big model for English to German on WMT 2014 (sections 5 and 6.1).

    transformer-jax train wmt14_big
    transformer-jax evaluate runs/wmt14_big

In the paper, 300,000 steps take 3.5 days on 8 P100 GPUs. The average of the last 20 checkpoints,
which are ten minutes apart, reaches 28.4 BLEU on newstest2014.

No model has been trained with this config yet.
"""

from configs.big import CONFIG as BIG

CONFIG = BIG.change(
    # At the paper's 1 s per step, training saves a checkpoint every ten minutes.
    train={"checkpoint_every": 600, "keep_checkpoints": 20},
    decode={"average_checkpoints": 20},
)
