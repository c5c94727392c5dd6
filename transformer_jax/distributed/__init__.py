"""Multi-process training: processes find each other, agree on decisions, and stop together."""
