"""The files of a run: its directory and its checkpoints."""

# The format version of run.json and of checkpoints. Other versions are rejected, not converted.
FORMAT = 3
