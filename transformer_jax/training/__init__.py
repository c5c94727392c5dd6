"""Training (sections 5.2 to 5.4)."""
