"""Variants that differ from the paper. Variants import the core, never the reverse."""
