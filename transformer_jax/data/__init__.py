"""Corpora, tokenizers, and batches (section 5.1)."""
