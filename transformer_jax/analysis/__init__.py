"""Comparisons and figures of trained runs."""
