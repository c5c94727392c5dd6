"""A treebank in a folder. Each sentence is a source, and its linearized tree is the target.

A split is a file (`dev.trees`, `dev.mrg`) or a folder of files (`dev/`). If neither exists, a
split consists of Wall Street Journal sections of the Penn Treebank, in the folders `00/` to `24/`.
Sections 02 to 21 are for training, section 22 is for development, and section 23 is for testing.

Files with the suffix `.trees` contain one tree per line. Trees in `.mrg` files may span several
lines. Both kinds of files may be compressed with gzip, xz, or bzip2.
"""

import itertools
import re
from collections.abc import Iterator
from pathlib import Path

from transformer_jax.data.linearization import linearize
from transformer_jax.data.splits import SPLITS, Split
from transformer_jax.data.text_files import SUFFIXES as COMPRESSED
from transformer_jax.data.text_files import FileCorpus, data_folder, read_lines
from transformer_jax.data.trees import Tree, read_trees
from transformer_jax.errors import DataError, Setting
from transformer_jax.files import is_stray
from transformer_jax.progress import note

SUFFIXES = tuple(f".{kind}{end}" for kind in ("trees", "mrg") for end in ("", *COMPRESSED))
# The Wall Street Journal sections in each split, by folder name.
WSJ_SECTIONS: dict[Split, tuple[str, ...]] = {
    "train": tuple(f"{number:02}" for number in range(2, 22)),
    "dev": ("22",),
    "test": ("23",),
}


class TreeFiles(FileCorpus):
    """A corpus of sentences and linearized trees."""

    kind = "linearized trees"

    def __init__(self, folder: str | None) -> None:
        """Find the files of each split; see `data_folder` for the default folder."""
        self._folder = data_folder(folder)
        try:
            files = {split: _find_files(self._folder, split) for split in SPLITS}
        except OSError as error:
            raise DataError(f"{self._folder} cannot be read: {error.strerror}") from error
        for split in ("train", "dev"):
            if not files[split]:
                raise DataError(
                    f"{self._folder} has no {split} trees: it needs {split}.trees, {split}.mrg, a "
                    f"folder {split}, or the sections of the Penn Treebank; choose a folder with ",
                    Setting("data.folder", "FOLDER"),
                )
        name = f"trees in {self._folder.resolve().name}"
        super().__init__(name, {split: paths for split, paths in files.items() if paths})

    def count(self, split: Split) -> int:
        """Check and count the trees; raise a DataError if one is invalid or the split is empty."""
        if split not in self._counts:
            count = sum(1 for _ in self._read_trees(split))
            if not count:
                raise DataError(f"{self.name} has no {split} trees")
            self._counts[split] = count
        return self._counts[split]

    def read(self, split: Split, start: int = 0) -> Iterator[tuple[str, str]]:
        """Yield each sentence and its linearized tree, starting at tree `start`."""
        for words, tags, brackets in itertools.islice(self._read_trees(split), start, None):
            yield " ".join(words), linearize(tags, brackets)

    def _read_trees(self, split: Split) -> Iterator[Tree]:
        for path in self._paths[split]:
            is_one_per_line = ".trees" in path.name.lower()
            name = str(path.relative_to(self._folder))
            yield from read_trees(read_lines(path), name, one_per_line=is_one_per_line)
        self._check_unchanged(split)


def _find_files(folder: Path, split: Split) -> list[Path]:
    single = [path for x in SUFFIXES if (path := folder / f"{split}{x}").is_file()]
    folders = [folder / split]
    if not folders[0].is_dir():
        folders = [folder / section for section in WSJ_SECTIONS[split]]
    files = itertools.chain(*(sorted(x.rglob("*")) for x in folders if x.is_dir()))
    trees = [path for path in files if path.name.lower().endswith(SUFFIXES)]
    own = [path for path in trees if not any(map(is_stray, path.relative_to(folder).parts))]
    others = [str(path.relative_to(folder)) for path in trees if path not in own]
    # Hidden files are never part of a treebank.
    if skipped := [name for name in others if not re.search(r"(^|/)\.", name)]:
        note(f"files skipped because they seem to be copies: {len(skipped)}, such as {skipped[0]}")
    places = [*single, *own[:1]]
    if len(places) > 1:
        first, second = (path.relative_to(folder) for path in places[:2])
        raise DataError(
            f"{folder} contains the {split} set twice, as {first} and as {second}: move one of them"
        )
    return single or own
