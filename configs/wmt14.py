"""Table 2: the base model for English to German on WMT 2014 (sections 5 and 6.1).

    transformer-jax prepare wmt14
    transformer-jax train wmt14
    transformer-jax evaluate runs/wmt14

In the paper, 100,000 steps take 12 hours on 8 P100 GPUs. The average of the last 5 checkpoints,
which are ten minutes apart, reaches 27.3 BLEU on newstest2014.

The first command downloads the text; see configs/base.py. No model has been trained with this
config yet.
"""

from configs.base import CONFIG as BASE

CONFIG = BASE.change(
    # At the paper's 0.4 s per step, training saves a checkpoint every ten minutes.
    train={"checkpoint_every": 1500, "keep_checkpoints": 5},
    decode={"average_checkpoints": 5},
)
