"""Training: one step, the loop around it, and its metrics (sections 5.2 to 5.4)."""
