"""Variants that differ from the paper.

The variants import the core model. In the core model, only `build` imports the variants.
"""
