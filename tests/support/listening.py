"""SECURITY.md's table of listening sockets, and the sockets of processes to compare with it."""

from __future__ import annotations

import ipaddress
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil

from tests.support.fenced import ROOT
from tests.support.processes import of_living

DOCUMENT = ROOT / "SECURITY.md"
ONE_MACHINE, CLUSTER = 3, 4
"""Columns with the addresses."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    process: str
    """Beginning of the process's name."""
    socket: str
    number: int
    addresses: frozenset[str]
    file: Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Listening:
    """``number`` sockets of the process ``pid`` at one kind of address."""

    pid: int
    process: str
    address: str
    number: int


def rows(column: int) -> tuple[Row, ...]:
    """Return the table, with the addresses of ``column``."""
    _, _, section = DOCUMENT.read_text().partition("## What listens where")
    lines = [line for line in section.splitlines() if line.startswith("| `")]
    return tuple(_row([cell.strip() for cell in line.strip("|").split(" | ")], column) for line in lines)


def _row(cells: list[str], column: int) -> Row:
    return Row(
        process=cells[0].strip("`"),
        socket=cells[1],
        number=int(cells[2]),
        addresses=frozenset(re.split(r",\s*", cells[column])),
        file=ROOT / cells[-1].strip("` "),
    )


def listening(processes: Iterable[psutil.Process]) -> list[Listening]:
    """Return the listening sockets of ``processes``, without those that have ended."""
    found: list[Listening] = []
    for process in processes:
        name: str = of_living(process.name, "")
        sockets = of_living(partial(process.net_connections, "inet"), [])
        addresses = Counter(_kind(one.laddr.ip) for one in sockets if one.status == psutil.CONN_LISTEN)
        found += [
            Listening(pid=process.pid, process=name, address=address, number=number)
            for address, number in addresses.items()
        ]
    return found


def _kind(text: str) -> str:
    address = ipaddress.ip_address(text)
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    if address.is_loopback:
        return "127.0.0.1"
    return "all interfaces" if address.is_unspecified else "node"


def differences(found: Iterable[Listening], table: Iterable[Row]) -> Iterator[str]:
    """Yield sockets that no row allows, and rows without any socket."""
    known, seen = tuple(table), set[Row]()
    for one in found:
        fitting = [row for row in known if one.process.startswith(row.process) and one.address in row.addresses]
        seen.update(fitting)
        if one.number > (allowed := sum(row.number for row in fitting)):
            yield f"{one.process} has {one.number} sockets at {one.address}, and the table {allowed}"
    yield from (f"nothing is like the row {row.process}: {row.socket}" for row in known if row not in seen)
