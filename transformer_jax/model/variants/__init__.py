"""Variants that differ from the paper. They import the core, and the core does not import them."""
