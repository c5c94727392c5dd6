"""Table 3, rows (B): does a narrower comparison of queries and keys hurt?

    transformer-jax params configs/d_k.py
    transformer-jax train configs/d_k.py:B1

The paper: yes, so "a more sophisticated compatibility function than dot product may be
beneficial". The values keep their width.
"""

from configs.table3 import SWEEP as TABLE3

SWEEP = {name: TABLE3[name] for name in ("base", "B1", "B2")}
