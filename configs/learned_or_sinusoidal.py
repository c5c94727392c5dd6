r"""Learned positions, rotary positions, and ALiBi instead of sinusoids, on Multi30k.

    transformer-jax sweep configs/learned_or_sinusoidal.py --rows E --seeds 10 \
        --control --tune train.learning_rate_scale 0.38 0.76 1.52

Each model is base or row (E) of configs/table3_multi30k.py, which describes the text and the size,
or base with positions from later work. A learning rate is chosen for each row.

Differs from the paper in the same ways as configs/table3_multi30k.py.
"""

from configs.table3_multi30k import BASE
from configs.table3_multi30k import SWEEP as TABLE3
from transformer_jax.config import Row

SWEEP = {
    "base": TABLE3["base"],
    "E": TABLE3["E"],
    "rotary": Row(BASE.change(model={"positions": "rotary"})),
    "alibi": Row(BASE.change(model={"positions": "alibi"})),
}
