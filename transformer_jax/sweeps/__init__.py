"""Sweeps: train each row of an ablation with several seeds, and report the results (Table 3)."""
