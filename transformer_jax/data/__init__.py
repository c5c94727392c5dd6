"""Text, pieces and batches (section 5.1)."""
