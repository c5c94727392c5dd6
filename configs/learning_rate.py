"""Which peak learning rate and warmup best suit the base model in configs/table3_multi30k.py?

    transformer-jax sweep learning_rate --seeds 1

The row name p3_w500 means a peak learning rate of 0.003 after 500 warmup steps.

Differs from the paper: each row sets the peak learning rate directly instead of using 1 /
sqrt(d_model * warmup_steps).
"""

from configs.table3_multi30k import with_peak
from transformer_jax.config import Row

SHORT = {"steps": 2000, "bleu_every": 1}
SWEEP = {
    "p3_w500": Row(with_peak(0.003, 500).change(train=SHORT)),
    "p2_w500": Row(with_peak(0.002, 500).change(train=SHORT)),
    "p4_w1000": Row(with_peak(0.004, 1000).change(train=SHORT)),
    "p8_w1000": Row(with_peak(0.008, 1000).change(train=SHORT)),
}
