"""Who is alone and who prepares beside others wait for each other, and for nobody else."""

from __future__ import annotations

import logging
import multiprocessing as mp
import os
from pathlib import Path
from threading import Event, Thread

import pytest

from engines.core.storage.host_turns import HostTurns
from tests.support.patience import PATIENCE_S


def test_many_prepare_side_by_side_and_none_beside_who_is_alone(tmp_path: Path) -> None:
    turns, others = HostTurns(tmp_path / "new"), HostTurns(tmp_path / "new")
    with turns.beside_others(), others.beside_others():
        assert turns.try_alone() is None
    lock = turns.try_alone()
    assert lock is not None
    assert others.try_alone() is None
    has_begun = Event()

    def prepare() -> None:
        with others.beside_others():
            has_begun.set()

    thread = Thread(target=prepare)
    thread.start()
    assert not has_begun.wait(0.2)
    lock.close()
    thread.join(PATIENCE_S)
    assert has_begun.is_set()


def test_hosts_that_share_a_folder_do_not_wait_for_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = HostTurns(tmp_path)
    monkeypatch.setattr("socket.gethostname", lambda: "another")
    with here.beside_others():
        assert HostTurns(tmp_path).try_alone() is not None


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


def test_a_folder_that_cannot_be_written_keeps_nobody_from_anything(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "file"
    file.touch()
    with caplog.at_level(logging.WARNING), HostTurns(file).beside_others():
        assert HostTurns(file).try_alone() is None
    assert "processes that share GPUs cannot take turns" in caplog.text
