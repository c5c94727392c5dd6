"""Write a model to a folder that Hugging Face's `MarianMTModel` and `MarianTokenizer` can load."""

import json
from pathlib import Path

from transformer_jax.data.tokenizer import Tokenizer
from transformer_jax.files import new_folder
from transformer_jax.inference.trained_run import Run
from transformer_jax.sharing.expressible import check_exportable
from transformer_jax.sharing.marian_parameters import to_marian
from transformer_jax.sharing.marian_settings import (
    generation_settings,
    model_settings,
    write_tokenizers,
)
from transformer_jax.sharing.parameters import write_arrays

MIN_POSITIONS = 512


def export_marian(run: Run, path: Path) -> None:
    """Export a run's model in float32 to a new folder in Marian's format.

    Layer normalization in Marian always uses `LAYER_NORM_EPSILON`.

    Raises:
        UsageError: the folder exists, safetensors is not installed, or Marian cannot express the
            model.
        StorageError: the folder cannot be written.
    """
    check_exportable(run.config, "marian")
    config, vocabulary = run.config.model, run.vocabulary
    table = vocabulary.target.table
    num_positions = max(config.max_length + run.config.decode.max_extra_length, MIN_POSITIONS)
    documents = {
        "config.json": model_settings(config, num_positions, table, **vocabulary.sizes),
        "generation_config.json": generation_settings(run),
        "tokenizer_config.json": {
            "tokenizer_class": "MarianTokenizer",
            "clean_up_tokenization_spaces": False,
            "model_max_length": config.max_length,
            "separate_vocabs": not vocabulary.is_shared,
        },
        "vocab.json": _token_ids(vocabulary.source),
    }
    if not vocabulary.is_shared:
        documents["target_vocab.json"] = _token_ids(vocabulary.target)
    with new_folder(path) as folder:
        arrays = to_marian(config, run.params, vocabulary)
        write_arrays(folder / "model.safetensors", arrays, {"format": "pt"})
        for name, content in documents.items():
            text = json.dumps(content, indent=2, ensure_ascii=False)
            (folder / name).write_text(f"{text}\n", "utf-8")
        write_tokenizers(folder, run.vocabulary)


def _token_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """Return Marian's ID for each token."""
    tokens = tokenizer.token_texts if tokenizer.table is None else tokenizer.table.tokens
    return {text: token for token, text in enumerate(tokens)}
