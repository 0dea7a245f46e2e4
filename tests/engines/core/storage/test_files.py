"""Files that are there as a whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from engines.core.storage.files import write_atomically


@pytest.fixture
def umask() -> Iterator[int]:
    """A mask that lets a group read."""
    mask = 0o027
    before = os.umask(mask)
    yield mask
    os.umask(before)


def test_a_file_replaces_the_one_before_it(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "file.bin"
    for data in (b"first", b"the second"):
        write_atomically(path, data)
        assert path.read_bytes() == data
    assert list(path.parent.iterdir()) == [path]


def test_permissions_are_those_of_any_new_file(tmp_path: Path, umask: int) -> None:
    write_atomically(tmp_path / "file", b"data")
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o666 & ~umask


def test_a_disk_that_fails_leaves_the_old_file_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_atomically(tmp_path / "file", b"old")

    def fail(descriptor: int) -> NoReturn:
        assert [path.read_bytes() for path in tmp_path.iterdir()].count(b"new") == 1, "the new one lies beside it"
        raise OSError("the disk is full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="the disk is full"):
        write_atomically(tmp_path / "file", b"new")
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"old"]
