"""Sweeps train the rows of an ablation with several seeds and report the results (Table 3)."""
