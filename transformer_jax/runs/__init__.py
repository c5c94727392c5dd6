"""The files of a run: its directory and its checkpoints."""

# Version of run.json and of checkpoints. Other versions are rejected, not converted.
FORMAT = 3
