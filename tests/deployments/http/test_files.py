"""The store of pictures by URL is swept by several requests at a time."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from deployments.clips.storage import StorageLostError
from deployments.http.errors import from_failure
from deployments.http.files import FileShelf


def test_a_file_that_another_sweep_has_deleted_is_no_error(tmp_path: Path) -> None:
    shelf = FileShelf(folder=tmp_path, lifetime_s=100, max_bytes=10)
    gone = f"{'0' * 32}.png"
    (tmp_path / gone).symlink_to(tmp_path / "nowhere")  # listed, and gone when it is looked at
    name = shelf.put(b"picture", "png")
    found = shelf.find(name)
    assert found is not None
    assert found.read_bytes() == b"picture"
    assert shelf.find(gone) is None


def test_a_folder_that_refuses_files_is_unavailable(tmp_path: Path) -> None:
    (tmp_path / "files").touch()
    shelf = FileShelf(folder=tmp_path / "files", lifetime_s=100, max_bytes=10)
    with pytest.raises(StorageLostError, match="cannot be used") as raised:
        shelf.put(b"picture", "png")
    answer = from_failure(raised.value)
    assert answer is not None
    assert (answer.status, answer.code) == (503, "storage_unavailable")


def test_names_that_were_never_handed_out_find_nothing(tmp_path: Path) -> None:
    shelf = FileShelf(folder=tmp_path / "files", lifetime_s=100, max_bytes=10)
    shelf.put(b"picture", "png")
    (tmp_path / "secret.png").write_bytes(b"secret")
    (tmp_path / "files" / "other.png").write_bytes(b"other")
    for name in ("../secret.png", "other.png", "", "."):
        assert shelf.find(name) is None


def test_half_written_files_are_swept(tmp_path: Path) -> None:
    """SIGKILL leaves such files; one of them may be in use by a writer."""
    shelf = FileShelf(folder=tmp_path, lifetime_s=100, max_bytes=1000)
    left, current = (tmp_path / f".{digit * 32}.png.{'a' * 8}" for digit in "01")
    for path in (left, current):
        path.write_bytes(b"part")
    foreign = tmp_path / ".keep"
    foreign.touch()
    for path in (left, foreign):
        os.utime(path, (1, 1))
    shelf.put(b"picture", "png")
    assert (left.exists(), current.exists(), foreign.exists()) == (False, True, True)
