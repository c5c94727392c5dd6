"""Corpora, tokenizers, and batches (section 5.1)."""

from typing import TYPE_CHECKING

from transformer_jax.exports import lazy_exports

if TYPE_CHECKING:
    from transformer_jax.data.batches import Batch
    from transformer_jax.data.corpora import CORPORA, Corpus
    from transformer_jax.data.prepare import prepare_text

__all__ = ["CORPORA", "Batch", "Corpus", "prepare_text"]

__getattr__ = lazy_exports(__name__)
