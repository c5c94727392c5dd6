"""Table 3, rows (B): do narrower queries and keys reduce quality?

    transformer-jax params configs/d_k.py
    transformer-jax train configs/d_k.py:B1

The paper's answer is yes: "reducing the attention key size d_k hurts model quality". In these rows,
the width of the values does not change.
"""

from configs.table3 import SWEEP as TABLE3

SWEEP = {name: TABLE3[name] for name in ("base", "B1", "B2")}
