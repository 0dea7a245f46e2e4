"""Some folders and files are unreadable for other users of the machine, and some cannot be written at all."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from deployments.clips.storage import ClipFolders
from deployments.database.database import open_database
from deployments.http.files import FileShelf
from deployments.places import (
    OwnedFolder,
    file_refusal,
    make_folder,
    make_private,
    make_private_file,
    refusal,
)

ROOT = Path(__file__).parents[2]


def modes(root: Path) -> set[int]:
    return {path.stat().st_mode & 0o777 for path in (root, *root.rglob("*"))}


async def test_clips_pictures_and_records_are_their_owner_s_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        ClipFolders(root=tmp_path / "videos").write("a", "video", b"clip")
        FileShelf(folder=tmp_path / "files", lifetime_s=9, max_bytes=99).put(b"picture", "png", "of-a-key")
        engine = await open_database(f"sqlite:///{tmp_path / 'jobs.sqlite3'}")
        await engine.dispose()
        make_private_file(tmp_path / "file")
    finally:
        os.umask(before)
    for name in ("videos", "files"):
        assert modes(tmp_path / name) == {0o700, 0o600}
    for name in ("file", "jobs.sqlite3"):
        assert modes(tmp_path / name) == {0o600}


def test_what_is_there_is_closed_where_it_is_ours_to_close(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    make_folder(tmp_path)
    assert modes(tmp_path) == {0o755}, "it may have files of other users"
    make_private(tmp_path)
    assert modes(tmp_path) == {0o700}
    file = tmp_path / "file"
    file.write_text("kept")
    file.chmod(0o644)
    make_private_file(file)
    assert (file.stat().st_mode & 0o777, file.read_text()) == (0o600, "kept")


def test_refusals(tmp_path: Path) -> None:
    """The kernel makes no file in /proc, not even for root."""
    assert refusal(tmp_path / "a" / "b") is None
    assert file_refusal(tmp_path / "a") is None
    assert str(refusal(Path("/proc/self"))).startswith("/proc/self cannot be written (")
    assert str(refusal(Path("/proc/self/a/b"))).startswith(
        "/proc/self/a/b cannot be made: /proc/self cannot be written ("
    )
    assert list(tmp_path.iterdir()) == []


HOLDER = """
import sys, time
from pathlib import Path
from deployments.places import OwnedFolder
folder = OwnedFolder.make(Path(sys.argv[1]), "own_")
print(folder.path, flush=True)
time.sleep(600)
"""


def test_a_folder_whose_owner_was_killed_goes_at_the_next_start(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert holder.stdout is not None
        orphan = Path(holder.stdout.readline().strip())
        other = OwnedFolder.make(tmp_path, "own_")
        assert orphan.is_dir(), "its owner lives"
    finally:
        holder.kill()
        holder.communicate()
    assert orphan.is_dir()
    OwnedFolder.make(tmp_path, "another_").delete()
    assert orphan.is_dir(), "another kind's folder stays"
    OwnedFolder.make(tmp_path, "own_").delete()
    assert list(tmp_path.iterdir()) == [other.path]
    other.delete()
    assert list(tmp_path.iterdir()) == []


def test_only_folders_with_a_lock_of_ones_own_are_swept(tmp_path: Path) -> None:
    """A link to a folder, which another user may have made in ``/tmp``, is not followed."""
    target = tmp_path / "target"
    target.mkdir()
    (target / "lock").touch()
    (tmp_path / "own_link").symlink_to(target)
    (tmp_path / "own_without_lock").mkdir()
    (tmp_path / "own_file").touch()
    before = {*tmp_path.rglob("*")}
    OwnedFolder.make(tmp_path, "own_").delete()
    assert {*tmp_path.rglob("*")} == before


def test_a_folder_that_is_swept_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, swept = fcntl.flock, list[str]()

    def lock_late(file: int, operation: int) -> None:
        if not swept and operation == fcntl.LOCK_EX:
            swept.extend(path.name for path in tmp_path.iterdir())
            OwnedFolder.make(tmp_path, "own_").delete()
        lock(file, operation)

    monkeypatch.setattr("fcntl.flock", lock_late)
    folder = OwnedFolder.make(tmp_path, "own_")
    assert len(swept) == 1
    assert folder.path.name not in swept
    assert list(tmp_path.iterdir()) == [folder.path]
