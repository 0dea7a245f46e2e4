"""Keys come from a file that changes, and have limits and names."""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
from pathlib import Path

import pytest

from deployments.usage.api_keys import KeyRing, read_keys


class Watched:
    """A ring of keys with a clock that a test sets, and its file."""

    def __init__(self, file: Path, text: str) -> None:
        self.now_s = 0.0
        self.file = file
        self.write(text)
        self.ring = KeyRing(("fixed",), file, clock=lambda: self.now_s)

    def write(self, text: str) -> None:
        self.file.write_text(text)
        os.utime(self.file, ns=(0, int(1e9 * self.now_s)))

    def known(self, *keys: str) -> list[str]:
        return [key for key in keys if self.ring.find(key)]


@pytest.fixture
def watched(tmp_path: Path) -> Watched:
    return Watched(tmp_path / "keys", "one\ntwo\n")


def test_revoked_and_new_keys_need_no_restart(watched: Watched) -> None:
    assert watched.known("fixed", "one", "two", "six") == ["fixed", "one", "two"]
    watched.now_s = 0.5
    watched.write("one\nsix\n")
    assert watched.known("one", "two", "six") == ["one", "two"], "it was looked at less than a second ago"
    watched.now_s = 1.0
    assert watched.known("fixed", "one", "two", "six") == ["fixed", "one", "six"]


@pytest.mark.parametrize("text", [None, "", "# all are commented out\n"], ids=["gone", "empty", "comments"])
def test_a_file_without_keys_leaves_them_as_they_were(
    watched: Watched, caplog: pytest.LogCaptureFixture, text: str | None
) -> None:
    watched.now_s = 2.0
    watched.file.unlink() if text is None else watched.write(text)
    with caplog.at_level(logging.WARNING, "troupe.keys"):
        assert watched.known("one", "two") == ["one", "two"]
        watched.now_s = 4.0
        assert watched.known("one", "two") == ["one", "two"]
    (record,) = caplog.records
    assert record.getMessage().startswith(f"the API keys stay as they were: the key file {watched.file}")
    watched.write("two\n")
    watched.now_s = 6.0
    assert watched.known("one", "two") == ["two"]


def test_lines_that_begin_with_a_hash_are_no_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# of the press office\n  one  \n\n#two\nthr#ee\n")
    assert read_keys(file) == ("one", "thr#ee")


def test_a_byte_order_mark_is_no_part_of_a_key(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("one\ntwo\n", encoding="utf-8-sig")
    assert read_keys(file) == ("one", "two")


def test_no_key_is_kept_as_it_is(watched: Watched) -> None:
    held = pickle.dumps({name: value for name, value in vars(watched.ring).items() if name != "_clock"})
    for key in (b"one", b"two", b"fixed"):
        assert hashlib.sha256(key).hexdigest().encode() in held
        assert key not in held.replace(b"_fixed", b"")
    assert watched.ring.find("one") == hashlib.sha256(b"one").hexdigest()


def test_an_empty_ring_asks_nobody(tmp_path: Path) -> None:
    assert not KeyRing()
    assert KeyRing(("one",))
    with pytest.raises(ValueError, match="empty API key"):
        KeyRing(("one", ""))
