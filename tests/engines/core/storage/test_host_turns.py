"""Who is alone and who prepares beside others wait for each other, and for nobody else."""

from __future__ import annotations

import errno
import logging
import multiprocessing as mp
import os
from pathlib import Path
from threading import Event, Thread
from unittest.mock import Mock

import pytest

from engines.core.storage.host_turns import HostTurns
from tests.support.patience import PATIENCE_S
from tests.support.turns import could_be_alone


def test_many_prepare_side_by_side_and_none_beside_who_is_alone(tmp_path: Path) -> None:
    turns, others = HostTurns(tmp_path / "new"), HostTurns(tmp_path / "new")
    with turns.beside_others(), others.beside_others():
        assert turns.try_alone() is None
    lock = turns.try_alone()
    assert lock is not None
    has_begun = Event()

    def prepare() -> None:
        with others.beside_others():
            has_begun.set()

    thread = Thread(target=prepare)
    with lock:
        assert others.try_alone() is None
        thread.start()
        assert not has_begun.wait(0.2)
    thread.join(PATIENCE_S)
    assert has_begun.is_set()


def test_hosts_that_share_a_folder_do_not_wait_for_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = HostTurns(tmp_path)
    monkeypatch.setattr("socket.gethostname", lambda: "another")
    with here.beside_others():
        assert could_be_alone(HostTurns(tmp_path))


def die_alone(folder: Path) -> None:
    assert HostTurns(folder).try_alone() is not None
    os._exit(1)


def test_a_process_that_ends_is_waited_for_by_nobody(tmp_path: Path) -> None:
    process = mp.get_context("fork").Process(target=die_alone, args=(tmp_path,))
    process.start()
    process.join(PATIENCE_S)
    assert process.exitcode == 1
    with HostTurns(tmp_path).beside_others():
        pass


def test_a_child_keeps_nobody_waiting(tmp_path: Path) -> None:
    """Compilers are started while a stage prepares, and live on."""
    context = mp.get_context("fork")
    ends = context.Event()
    with HostTurns(tmp_path).beside_others():
        child = context.Process(target=ends.wait)
        child.start()
    assert could_be_alone(HostTurns(tmp_path))
    ends.set()
    child.join(PATIENCE_S)


@pytest.mark.parametrize("can_be_written", [False, True])
def test_a_folder_without_locks_keeps_nobody_from_anything(
    can_be_written: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    if can_be_written:
        monkeypatch.setattr("fcntl.flock", Mock(side_effect=OSError(errno.ENOLCK, "no locks here")))
    else:
        file.touch()
    with caplog.at_level(logging.WARNING), HostTurns(file).beside_others():
        assert could_be_alone(HostTurns(file))
    assert "processes that share GPUs cannot take turns" in caplog.text
