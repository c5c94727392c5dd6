"""Write a folder so that it appears only when it is complete."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from transformer_jax.data.tokenizer import Vocabulary
from transformer_jax.errors import StorageError
from transformer_jax.runs.run_directory import check_available


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield a private folder, and rename it to `path` on exit.

    Raises:
        UsageError: the path already exists. Nothing is changed.
        StorageError: the folder cannot be written.
    """
    check_available(path, is_package=True)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(
            prefix=f".{path.name}-", dir=path.parent, ignore_cleanup_errors=True
        ) as private:
            # A temporary directory is private, but its subdirectory has ordinary permissions.
            folder = Path(private) / "model"
            folder.mkdir()
            yield folder
            folder.rename(path)
    except OSError as error:
        # Another process may have created the folder in the meantime.
        check_available(path, is_package=True)
        raise StorageError(f"{path} could not be written: {error}") from error


def write_tokenizers(folder: Path, vocabulary: Vocabulary) -> None:
    """Write the SentencePiece models under Marian's file names."""
    (folder / "source.spm").write_bytes(vocabulary.source.model)
    (folder / "target.spm").write_bytes(vocabulary.target.model)
