"""Translation and its scores (section 6.1)."""
