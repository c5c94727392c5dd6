"""Test the recipe for English-French captions with generated text in files of the same names."""

import gzip
from pathlib import Path

import numpy as np
import pytest
from corpora import write_multi30k

from transformer_jax.config.loading import load_config
from transformer_jax.data.prepare import prepare_text
from transformer_jax.data.splits import SPLITS


def test_the_recipe_differs_from_the_german_one_in_the_language_alone() -> None:
    german, french = load_config("multi30k"), load_config("multi30k_fr")
    changes = {key: pair for (_, key), pair in german.differences(french).items()}
    assert changes.keys() == set(SPLITS)
    for before, after in changes.values():
        assert str(after) == str(before).replace(".de.gz", ".fr.gz")


@pytest.mark.parametrize(("name", "language"), [("multi30k", "de"), ("multi30k_fr", "fr")])
def test_the_recipe_reads_the_captions_of_its_language(
    name: str, language: str, tmp_path: Path
) -> None:
    write_multi30k(tmp_path, ("en", language))
    config = load_config(name).change(data={"folder": str(tmp_path), "vocab_size": 120})
    prepared = prepare_text(config.data)
    for split, stem in (("train", "train"), ("dev", "val"), ("test", "test_2016_flickr")):
        files = (
            tmp_path / f"multi30k/tok/{stem}.lc.norm.tok.{side}.gz" for side in ("en", language)
        )
        expected = [gzip.decompress(file.read_bytes()).decode().splitlines() for file in files]
        if split == "train":
            # Only tokens are stored. Their order is not that of the lines.
            tokenizer, tokens = prepared.vocabulary.target, prepared.tokens(split)[1]
            sequences = np.split(tokens.flat, tokens.offsets[1:-1])
            found = tokenizer.decode([sequence.tolist() for sequence in sequences])
            assert sorted(found) == sorted(expected[1])
        else:
            assert list(prepared.lines(split)) == expected
