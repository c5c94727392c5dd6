"""Sweeps: train each row in an ablation with several seeds, and report the results (Table 3)."""
