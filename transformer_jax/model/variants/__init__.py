"""Departures from the paper. Each module imports the core; the core imports none of them."""
