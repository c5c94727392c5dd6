"""English-French captions of Multi30k, with the recipe of configs/multi30k.py.

    transformer-jax train configs/multi30k_fr.py --data.folder FOLDER

FOLDER is the same as for configs/multi30k.py. No model has been trained with this config yet, so
its quality is not known.

Differs from the paper in the same ways as configs/multi30k.py. The vocabulary size is an upper
limit: if the text yields fewer tokens, the vocabulary is smaller.
"""

from configs.multi30k import CONFIG as MULTI30K


def name_files(split: str) -> tuple[str, str]:
    """Return the names of the English and the French file of a split."""
    stem = f"multi30k/tok/{split}.lc.norm.tok"
    return f"{stem}.en.gz", f"{stem}.fr.gz"


CONFIG = MULTI30K.change(
    data={
        "train": name_files("train"),
        "dev": name_files("val"),
        "test": name_files("test_2016_flickr"),
    }
)
