"""Sweeps train the rows of an ablation from several seeds and report the results (Table 3)."""
