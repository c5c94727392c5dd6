"""What is stored of a run: its folder and its checkpoints."""
