"""SECURITY.md lists every socket on which a running application listens."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import partial

import psutil

from tests.deployments.support.live import wait_until
from tests.support.listening import CLUSTER, ONE_MACHINE, Listening, differences, listening, rows
from tests.support.processes import cmdline, of_living

OF_THE_APPLICATION = ("gcs_server", "raylet", "haproxy")
ZYGOTE = "deployments.zygote"


def processes() -> list[psutil.Process]:
    """Return the processes of the cluster and the door with all children, without this process and other tests'."""
    roots = [one for one in psutil.Process().children() if is_root(one)]
    return roots + [one for root in roots for one in of_living(partial(root.children, recursive=True), [])]


def is_root(process: psutil.Process) -> bool:
    return of_living(process.name, "") in OF_THE_APPLICATION or ZYGOTE in cmdline(process)


def test_what_listens_in_a_cluster_is_in_the_table(url: str) -> None:
    """Here Ray listens as with `ray start`."""
    found: list[str] = []

    def agree() -> bool:
        """Return whether the table is right; it is not while a gang is rebuilt after another test."""
        found[:] = differences(listening(processes()), rows(CLUSTER))
        return not found

    with suppress(AssertionError):  # `found` says more
        wait_until(agree, "the table of SECURITY.md")
    assert found == []


def test_a_new_socket_and_an_old_row_are_noticed() -> None:
    table = rows(ONE_MACHINE)
    assert {row.file for row in table if not row.file.is_file()} == set()
    rank = Listening(pid=1, process="ray::Rank", address="127.0.0.1", number=3)
    others = [
        Listening(pid=2, process=row.process, address="127.0.0.1", number=row.number)
        for row in table
        if not row.process.startswith("ray::Rank")
    ]
    assert list(differences([rank, *others], table)) == []
    (more,) = differences([replace(rank, number=4), *others], table)
    assert more == "ray::Rank has 4 sockets at 127.0.0.1, and the table 3"
    (elsewhere, *_) = differences([replace(rank, address="all interfaces"), *others], table)
    assert elsewhere == "ray::Rank has 3 sockets at all interfaces, and the table 0"
    assert all("the row ray::Rank" in line for line in differences(others, table))
    assert len(list(differences(others, table))) == 2
