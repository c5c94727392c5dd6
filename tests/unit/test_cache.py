"""Test that an environment variable sets the cache folder and that the default is writable."""

import errno
import os
import tempfile
import warnings
from pathlib import Path
from unittest.mock import Mock

import pytest

from transformer_jax.cache import cache_folder, enable_compilation_cache
from transformer_jax.errors import StorageError, UsageError
from transformer_jax.progress import Note


def test_the_cache_is_in_the_folder_of_the_environment_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRANSFORMER_JAX_CACHE", str(tmp_path / "mine"))
    assert cache_folder("x") == tmp_path / "mine" / "x"
    assert (tmp_path / "mine" / "x").is_dir()


@pytest.mark.parametrize("url", ["s3://bucket/cache", "gs://bucket"])
def test_a_cache_in_a_bucket_is_rejected_with_what_to_do_instead(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRANSFORMER_JAX_CACHE", url)
    with pytest.raises(UsageError, match=f"copy {url} to ~/.cache/transformer_jax"):
        cache_folder("x")


def test_a_cache_folder_of_the_user_that_cannot_be_created_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TRANSFORMER_JAX_CACHE", str(tmp_path / "file"))
    with pytest.raises(StorageError, match=r"the cache folder .* cannot be created") as caught:
        cache_folder("x")
    assert str(tmp_path / "file") in str(caught.value)
    assert "\n" not in str(caught.value)
    # Compiled programs only save time, so a command that needs no other part of the cache works.
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    with pytest.warns(Note, match=r"cannot be created: .*; compiled programs are not stored"):
        enable_compilation_cache()
    monkeypatch.setenv("TRANSFORMER_JAX_CACHE", str(tmp_path / "read-only"))
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.warns(Note, match=r"is not writable; compiled programs are not stored"):
        enable_compilation_cache()
    with warnings.catch_warnings(action="error"):
        enable_compilation_cache()


def test_the_default_cache_moves_to_temporary_files_if_it_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "temporary").mkdir()
    monkeypatch.delenv("TRANSFORMER_JAX_CACHE")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert cache_folder("x") == tmp_path / "cache" / "transformer_jax" / "x"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    temporary = cache_folder("x")
    assert temporary == tmp_path / "temporary" / f"transformer_jax-{os.getuid()}" / "x"
    assert temporary.is_dir()
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder("x") == tmp_path / "home" / ".cache" / "transformer_jax" / "x"


def test_a_temporary_cache_folder_of_another_user_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.delenv("TRANSFORMER_JAX_CACHE")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(Path, "chmod", Mock(side_effect=PermissionError(errno.EPERM, "not yours")))
    with pytest.raises(StorageError, match=r"^the cache folder .* cannot be made private: not you"):
        cache_folder("x")
