"""Plots of attention, positional encodings, training, and head importance, drawn from arrays."""
