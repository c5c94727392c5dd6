"""A run's files: its folder and checkpoints."""

# The format version of run.json and of checkpoints. Other versions are rejected, not converted.
FORMAT = 3
