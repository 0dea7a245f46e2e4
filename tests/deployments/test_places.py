"""Folders and files that other users of the machine cannot read, and those that nobody can write."""

from __future__ import annotations

import os
from pathlib import Path

from deployments.clips.storage import ClipFolders
from deployments.database.database import open_database
from deployments.http.files import FileShelf
from deployments.places import file_refusal, make_folder, make_private, make_private_file, refusal


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
    assert modes(tmp_path) == {0o755}, "somebody may have others in it"
    make_private(tmp_path)
    assert modes(tmp_path) == {0o700}
    file = tmp_path / "file"
    file.write_text("kept")
    file.chmod(0o644)
    make_private_file(file)
    assert (file.stat().st_mode & 0o777, file.read_text()) == (0o600, "kept")


def test_refusals(tmp_path: Path) -> None:
    """The kernel makes no file in /proc, for root neither."""
    assert refusal(tmp_path / "a" / "b") is None
    assert file_refusal(tmp_path / "a") is None
    assert str(refusal(Path("/proc/self"))).startswith("/proc/self cannot be written (")
    assert str(refusal(Path("/proc/self/a/b"))).startswith(
        "/proc/self/a/b cannot be made: /proc/self cannot be written ("
    )
    assert list(tmp_path.iterdir()) == []
