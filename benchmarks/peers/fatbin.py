"""CUDA fat binaries in a shared library: a kernel's code for several architectures, of which a GPU loads one.

The section ``.nv_fatbin`` holds containers; a container is a header and entries; an entry is a header and machine code
or PTX. NVIDIA does not publish the format. It is described in https://github.com/n-eiling/cuda-fatbin-decompression
(``fatbin-decompress.h``) and https://github.com/GrigoryEvko/nvopen-tools (``fatbin/FORMAT_SPECIFICATION.md``).
``nvprune`` does the same as this module to objects and static libraries, but not to shared ones.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

SECTION = b".nv_fatbin"
MAGIC = 0xBA55ED50
PTX, MACHINE_CODE = 1, 2

CONTAINER = struct.Struct("<I2xHQ")
"""Magic, bytes of this header, bytes of all entries."""
ENTRY = struct.Struct("<H2xIQ12xI")
"""Kind, bytes of this header, bytes of code, architecture (90: sm_90 or sm_90a)."""
ALIGNMENT = 8

ELF = b"\x7fELF\x02\x01"
"""64 bits, little-endian: https://refspecs.linuxfoundation.org/elf/gabi4+/ch4.eheader.html"""
ELF_HEADER = struct.Struct("<40xQ10xHHH")
"""Fields of the ELF header: offset of the section headers, bytes of each, their number, index of the names' section."""
ELF_SECTION = struct.Struct("<I20xQQ")
"""Offset of its name among the names, offset, bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    kind: int
    architecture: int
    begin: int
    """Where in the library its code begins."""
    num_bytes: int

    def runs_on(self, architecture: int) -> bool:
        """Return whether it is machine code for that major version, and this minor version or an earlier one."""
        own, other = divmod(self.architecture, 10), divmod(architecture, 10)
        return self.kind == MACHINE_CODE and own[0] == other[0] and own[1] <= other[1]


def only_for(library: bytes, architecture: int) -> bytes:
    """Return a shared library with zeros in place of machine code that a GPU of ``architecture`` cannot run.

    A container without such code keeps its PTX, which the driver can compile; others lose it. Nothing moves, and zeros
    take no room in a compressed archive. ValueError for other files.
    """
    trimmed = bytearray(library)
    for begin, end in sections(library, SECTION):
        for entries in containers(library, begin, end):
            kept = [entry for entry in entries if entry.runs_on(architecture)]
            kept = kept or [entry for entry in entries if entry.kind == PTX]
            for entry in entries:
                if entry not in kept:
                    trimmed[entry.begin : entry.begin + entry.num_bytes] = bytes(entry.num_bytes)
    return bytes(trimmed)


def sections(library: bytes, name: bytes) -> Iterator[tuple[int, int]]:
    """Yield begin and end of each section of that name."""
    if not library.startswith(ELF):
        raise ValueError(f"no shared library of 64 bits: it begins with {library[:6]!r}")
    place, size, count, index_of_names = ELF_HEADER.unpack_from(library)
    headers = [ELF_SECTION.unpack_from(library, place + i * size) for i in range(count)]
    names = headers[index_of_names][1]
    for name_at, begin, num_bytes in headers:
        if library.startswith(name + b"\0", names + name_at):
            yield begin, begin + num_bytes


def containers(library: bytes, begin: int, end: int) -> Iterator[list[Entry]]:
    """Yield the entries of each container of a section."""
    while begin + CONTAINER.size <= end:
        magic, header_bytes, num_bytes = CONTAINER.unpack_from(library, begin)
        if magic != MAGIC:  # room between containers
            begin += ALIGNMENT
            continue
        yield list(_entries(library, begin + header_bytes, begin + header_bytes + num_bytes))
        begin += header_bytes + num_bytes


def _entries(library: bytes, begin: int, end: int) -> Iterator[Entry]:
    while begin < end:
        kind, header_bytes, num_bytes, architecture = ENTRY.unpack_from(library, begin)
        begin += header_bytes
        if header_bytes < ENTRY.size or begin + num_bytes > end:
            raise ValueError(f"no entry of a fat binary at {begin - header_bytes}")
        yield Entry(kind=kind, architecture=architecture, begin=begin, num_bytes=num_bytes)
        begin += num_bytes
