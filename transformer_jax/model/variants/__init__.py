"""Variants that differ from the paper. They import the core, but the core does not import them."""
