"""Training: the training step, the training loop, and the metrics (sections 5.2 to 5.4)."""
