"""Translation and evaluation (section 6.1)."""
