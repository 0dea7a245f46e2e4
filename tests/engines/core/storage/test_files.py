"""Files that are there as a whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn

import pytest

from engines.core.storage.files import write_atomically, write_once


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


@pytest.mark.parametrize("has_links", [True, False])
def test_one_of_several_writes_a_file_that_was_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_links: bool
) -> None:
    def fail(*_: object) -> NoReturn:
        raise PermissionError(1, "Operation not permitted")

    if not has_links:  # many network file systems
        monkeypatch.setattr(os, "link", fail)
    path = tmp_path / "new" / "file"
    with ThreadPoolExecutor(8) as pool:
        wrote = list(pool.map(lambda number: write_once(path, f"{number}".encode()), range(8)))
    assert wrote.count(True) == 1
    assert path.read_text() == str(wrote.index(True))
    assert list(path.parent.iterdir()) == [path]
