"""Plots of attention, positions, training, and head importance, drawn from arrays."""
