"""The folder of our own cluster is private, short enough for sockets, and deleted afterwards."""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path

import pytest

from deployments.cli.local import _longest_socket, folder_problem, own_folder
from tests.deployments.support.commands import short_folder


def test_it_is_closed_to_others_and_gone_at_the_end(tmp_path: Path) -> None:
    base = tmp_path / "made"
    with own_folder({"RAY_TMPDIR": str(base)}) as folder:
        assert folder.parent == base
        assert folder.stat().st_mode & 0o777 == 0o700
    with pytest.raises(KeyboardInterrupt), own_folder({"RAY_TMPDIR": str(base)}):
        raise KeyboardInterrupt
    assert list(base.iterdir()) == []


def test_logs_of_a_failure_stay_until_the_next_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    variables = {"RAY_TMPDIR": str(tmp_path)}
    with pytest.raises(ZeroDivisionError), own_folder(variables) as failed:
        raise ZeroDivisionError
    assert failed.is_dir()
    assert str(failed) in caplog.text
    (tmp_path / "tr_of_another_program").mkdir()
    with own_folder(variables) as running, own_folder(variables) as other:
        assert not failed.exists()
        assert running.is_dir()
        assert other.is_dir()
    assert [path.name for path in tmp_path.iterdir()] == ["tr_of_another_program"]


def test_the_lock_says_that_it_is_in_use(tmp_path: Path) -> None:
    with (
        own_folder({"TMPDIR": str(tmp_path)}) as folder,
        (folder / "lock").open() as lock,
        pytest.raises(BlockingIOError),
    ):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_the_longest_name_that_is_accepted_is_one_that_the_kernel_takes() -> None:
    """The kernel rejects the shortest name that is refused."""
    with short_folder() as short:
        room = 107 - len(os.fsencode(_longest_socket(short)))
        assert room > 1
        for num_more, is_accepted in ((room - 1, True), (room, False)):
            base = short / ("a" * num_more)
            path = _longest_socket(base)
            path.parent.mkdir(parents=True)
            with socket.socket(socket.AF_UNIX) as one:
                if is_accepted:
                    one.bind(str(path))
                    assert folder_problem({"RAY_TMPDIR": str(base)}) is None
                else:
                    with pytest.raises(OSError, match="too long"):
                        one.bind(f"{path}")
                    problem = folder_problem({"RAY_TMPDIR": str(base)})
                    assert problem is not None
                    assert f"RAY_TMPDIR is {base}, which is 1 bytes too long" in problem


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    with short_folder() as short:
        (short / "f").touch()
        problem = folder_problem({"RAY_TMPDIR": str(short / "f" / "g")})
        assert problem is not None
        assert "Not a directory" in problem
        assert "set RAY_TMPDIR" in problem
