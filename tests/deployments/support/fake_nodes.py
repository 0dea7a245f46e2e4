"""A cluster of fake nodes (``benchmarks.serving.fake_nodes``), and its processes' logs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.serving.fake_nodes import FakeCluster, fake_cluster
from tests.deployments.support.live import log_lines, log_texts


class FakeNodes(FakeCluster):
    """A running cluster."""

    __slots__ = ()

    def logged(self, message: str) -> list[dict[str, Any]]:
        """See ``log_lines``."""
        return log_lines(message, self.logs)

    def rank_pids(self, model: str) -> list[list[int]]:
        """Return the processes of each gang that was ready once, by rank; the newest gang is last."""
        return [line["pids"] for line in self.logged("gang is ready") if line["model"] == model]

    def busy_nodes(self) -> set[str]:
        """Return the nodes whose ranks have begun a job."""
        names = [name for name, text in log_texts(self.logs).items() if '"job begins"' in text]
        pids = {int(name.rsplit("-", 1)[1]) for name in names}
        return {node_id for pid, node_id in self.nodes_of_ranks().items() if pid in pids}

    def lost_requests(self) -> list[dict[str, Any]]:
        """Return the log lines of requests that were retried, or dropped, after losing their gang."""
        return [line for line in self.logged("request ") if "lost its gang" in line["message"]]


@contextmanager
def fake_nodes(folder: Path, *, idle_timeout_s: float) -> Iterator[FakeNodes]:
    """See ``fake_cluster``."""
    with fake_cluster(folder, idle_timeout_s=idle_timeout_s) as one:
        yield FakeNodes(folder=one.folder, dashboard=one.dashboard, address=one.address)
