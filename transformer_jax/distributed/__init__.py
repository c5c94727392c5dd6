"""Multi-process training: find the other processes, agree with them, and stop together."""
