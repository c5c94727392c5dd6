"""Row (E) of Table 3, and position schemes from earlier and later work.

    transformer-jax params configs/positions.py
    transformer-jax train configs/positions.py:E

In the paper, learned positions give "nearly identical results" to sinusoids. The paper does not
evaluate the other schemes in this sweep.
"""

from configs.base import CONFIG as BASE
from configs.table3 import SWEEP as TABLE3
from transformer_jax.config import Row

SWEEP = {
    "base": TABLE3["base"],
    "E": TABLE3["E"],
    "none": Row(BASE.change(model={"positions": "none"})),
    "concatenated": Row(BASE.change(model={"positions": "concatenated_sinusoidal"})),
    "relative": Row(BASE.change(model={"positions": "relative"})),
    "rotary": Row(BASE.change(model={"positions": "rotary"})),
    "alibi": Row(BASE.change(model={"positions": "alibi"})),
    "t5": Row(BASE.change(model={"positions": "t5"})),
}
