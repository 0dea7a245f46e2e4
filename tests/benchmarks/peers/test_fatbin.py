"""Machine code for other GPUs is removed from a small shared library."""

from __future__ import annotations

import struct

import pytest

from benchmarks.peers.fatbin import CONTAINER, ENTRY, MACHINE_CODE, MAGIC, PTX, SECTION, only_for

HEADER = struct.Struct("<4sBB34xQ10xHHH")
SECTION_HEADER = struct.Struct("<IIQQQQ16x")
NAMES = b"\0.shstrtab\0.data\0.nv_fatbin\0"
Code = tuple[int, int, bytes]


def container(*entries: Code) -> bytes:
    """Return a fat binary of (kind, architecture, code), with headers longer than the part that is read."""
    room = bytes(64 - ENTRY.size)
    body = b"".join(ENTRY.pack(kind, 64, len(code), sm) + room + code for kind, sm, code in entries)
    return CONTAINER.pack(MAGIC, CONTAINER.size, len(body)) + body


def library(fatbin: bytes, data: bytes = b"") -> bytes:
    """Return an ELF file with these sections, their headers at its end."""
    contents = {b".shstrtab": NAMES, b".data": data, SECTION: fatbin}
    body, headers = b"", []
    for name, content in contents.items():
        headers.append(SECTION_HEADER.pack(NAMES.index(name), 1, 0, 0, HEADER.size + len(body), len(content)))
        body += content
    place = HEADER.size + len(body)
    return HEADER.pack(b"\x7fELF", 2, 1, place, SECTION_HEADER.size, len(headers), 0) + body + b"".join(headers)


def code_of(kind: int, architecture: int) -> Code:
    return kind, architecture, f"{kind} of {architecture}".encode().ljust(16, b".")


def emptied(code: Code) -> Code:
    return *code[:2], bytes(len(code[2]))


OURS, OURS_FOR_ANY = code_of(MACHINE_CODE, 90), code_of(PTX, 90)
OLDER, NEWER, OLD_FOR_ANY = code_of(MACHINE_CODE, 80), code_of(MACHINE_CODE, 100), code_of(PTX, 80)


def test_only_code_for_the_gpu_is_left_where_it_was() -> None:
    before = container(OLDER, OURS, NEWER, OURS_FOR_ANY)
    after = container(emptied(OLDER), OURS, emptied(NEWER), emptied(OURS_FOR_ANY))
    assert only_for(library(before), 90) == library(after)


def test_code_that_the_driver_can_compile_stays_where_there_is_no_other() -> None:
    before = container(OLDER, OLD_FOR_ANY)
    assert only_for(library(before), 90) == library(container(emptied(OLDER), OLD_FOR_ANY))


def test_a_later_minor_version_runs_the_code_of_an_earlier_one_and_not_the_reverse() -> None:
    newer = code_of(MACHINE_CODE, 86)
    assert only_for(library(container(OLDER, newer)), 86) == library(container(OLDER, newer))
    assert only_for(library(container(OLDER, newer)), 80) == library(container(OLDER, emptied(newer)))


def test_containers_lie_apart() -> None:
    before = bytes(24) + container(OLDER, OURS) + bytes(8) + container(NEWER, OURS) + bytes(8)
    after = bytes(24) + container(emptied(OLDER), OURS) + bytes(8) + container(emptied(NEWER), OURS) + bytes(8)
    assert only_for(library(before), 90) == library(after)


def test_other_sections_are_not_touched() -> None:
    whole = library(b"", data=container(OLDER, OURS))
    assert only_for(whole, 90) == whole


@pytest.mark.parametrize("bad", [b"", b"PK\x03\x04 a wheel", b"\x7fELF\x01\x01" + bytes(60)])
def test_what_is_no_library_of_64_bits_is_refused(bad: bytes) -> None:
    with pytest.raises(ValueError, match="64 bits"):
        only_for(bad, 90)


def test_an_entry_that_leads_out_of_its_container_is_refused() -> None:
    fatbin = bytearray(container(OURS))
    struct.pack_into("<Q", fatbin, CONTAINER.size + 8, 1000)
    with pytest.raises(ValueError, match="no entry"):
        only_for(library(bytes(fatbin)), 90)
