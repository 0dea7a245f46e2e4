"""A file is complete or absent, and processes share locks."""

from __future__ import annotations

import errno
import logging
import multiprocessing as mp
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event, Thread
from typing import NoReturn
from unittest.mock import Mock

import pytest

from engines.core.storage import HostLock, write_atomically, write_once
from tests.support.locks import is_free
from tests.support.patience import PATIENCE_S


@pytest.fixture
def umask() -> Iterator[int]:
    """Set and yield a mask that lets a group read."""
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

    if not has_links:  # like many network file systems
        monkeypatch.setattr(os, "link", fail)
    path = tmp_path / "new" / "file"
    with ThreadPoolExecutor(8) as pool:
        wrote = list(pool.map(lambda number: write_once(path, f"{number}".encode()), range(8)))
    assert wrote.count(True) == 1
    assert path.read_text() == str(wrote.index(True))
    assert list(path.parent.iterdir()) == [path]


def test_many_hold_a_lock_together_or_one_alone(tmp_path: Path) -> None:
    lock, others = HostLock(tmp_path / "new"), HostLock(tmp_path / "new")
    with lock.shared(), others.shared():
        assert lock.try_exclusive() is None
    held = lock.try_exclusive()
    assert held is not None
    has_begun = Event()

    def prepare() -> None:
        with others.shared():
            has_begun.set()

    thread = Thread(target=prepare)
    with held:
        assert others.try_exclusive() is None
        thread.start()
        assert not has_begun.wait(0.2)
    thread.join(PATIENCE_S)
    assert has_begun.is_set()


def test_hosts_that_share_a_folder_have_a_lock_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = HostLock(tmp_path)
    monkeypatch.setattr("socket.gethostname", lambda: "another")
    with here.shared():
        assert is_free(HostLock(tmp_path))


def die_alone(folder: Path) -> None:
    assert HostLock(folder).try_exclusive() is not None
    os._exit(1)


def test_a_process_that_ends_releases_its_lock(tmp_path: Path) -> None:
    process = mp.get_context("fork").Process(target=die_alone, args=(tmp_path,))
    process.start()
    process.join(PATIENCE_S)
    assert process.exitcode == 1
    with HostLock(tmp_path).shared():
        pass


def test_a_child_does_not_keep_its_parents_lock(tmp_path: Path) -> None:
    """Compilers start while a stage prepares, and outlive it."""
    context = mp.get_context("fork")
    ends = context.Event()
    with HostLock(tmp_path).shared():
        child = context.Process(target=ends.wait)
        child.start()
    assert is_free(HostLock(tmp_path))
    ends.set()
    child.join(PATIENCE_S)


@pytest.mark.parametrize("can_be_written", [False, True])
def test_without_locks_in_its_folder_nobody_waits(
    can_be_written: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    if can_be_written:
        monkeypatch.setattr("fcntl.flock", Mock(side_effect=OSError(errno.ENOLCK, "no locks here")))
    else:
        file.touch()
    with caplog.at_level(logging.WARNING), HostLock(file).shared():
        assert is_free(HostLock(file))
    assert "cannot be locked" in caplog.text
