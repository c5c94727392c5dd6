"""Table 3, rows (A): how many heads work best for a fixed amount of computation?

    transformer-jax params configs/heads.py
    transformer-jax train configs/heads.py:A1

In the paper, a single head is 0.9 BLEU worse than the best setting, and too many heads also reduce
quality.
"""

from configs.table3 import SWEEP as TABLE3

SWEEP = {name: TABLE3[name] for name in ("base", "A1", "A2", "A3", "A4")}
