"""Scores of translations and parses, and evaluation of trained runs."""
