"""Table 3, row (E), and one more: sinusoids, learned positions, and none at all.

    transformer-jax params configs/positions.py
    transformer-jax train configs/positions.py:E

The paper: learned positions are "nearly identical" to sinusoids. It did not try none.
"""

from configs.base import CONFIG as BASE
from configs.table3 import SWEEP as TABLE3
from transformer_jax.config import Row

SWEEP = {
    "base": TABLE3["base"],
    "E": TABLE3["E"],
    "none": Row(BASE.change(model={"positions": "none"})),
}
