"""Sweeps: many runs of one question, launched, watched and reported (Table 3)."""
