"""The comparison with this host's gangs takes times from Serve's log, and covers part of a run."""

from __future__ import annotations

from datetime import datetime

import pytest

from benchmarks.simulate_cluster.comparison import Run
from benchmarks.simulate_cluster.one_host import gangs_of, moments_of

BEGIN = datetime(2026, 11, 29, 18, 56, 10).timestamp()


def line(second: str, what: str) -> str:
    """Return a line of Ray 2.60's controller."""
    return f"INFO 2026-11-29 18:56:{second} controller 6851 -- {what}"


def replica(name: str, deployment: str = "Denoiser-flux-shapes") -> str:
    return f"Replica(id='{name}', deployment='{deployment}', app='troupe')"


LINES = (
    line("11,000", "Upscaling Deployment(name='Denoiser-flux-shapes', app='troupe') from 0 to 1 replicas."),
    line("11,100", f"Starting {replica('one')}."),
    line("11,200", f"Starting {replica('other', 'Decoder-flux-shapes')}."),
    line("13,000", f"{replica('one')} started successfully on node 'bb54' after 1.9s (PID: 7108)."),
    line("20,000", f"Starting {replica('two')}."),
    line("24,500", f"{replica('two')} started successfully on node 'bb54' after 4.5s (PID: 7245)."),
    line("30,000", f"Stopping {replica('two')} (currently ReplicaState.RUNNING)."),
    line("30,300", f"{replica('two')} is stopped."),
    line("31,000", f"Starting {replica('three')}."),
    line("32,000", f"Stopping {replica('three')} (currently ReplicaState.STARTING)."),
    line("40,000", f"Stopping {replica('one')} (currently ReplicaState.RUNNING)."),
)


def test_gangs_are_read_from_the_log_of_serves_controller() -> None:
    one, two, three = gangs_of(LINES)
    assert one.ready_s is not None
    assert one.ready_s - one.ordered_s == pytest.approx(1.9)
    assert two.ready_s is not None
    assert two.ready_s - two.ordered_s == pytest.approx(4.5)
    assert three.ready_s is None
    assert three.stopped_s == pytest.approx(BEGIN + 22.0)
    moments = moments_of([one, two, three], BEGIN)
    expected = [(0.0, 0), (3.0, 1), (14.5, 2), (20.0, 1), (30.0, 0)]
    assert [num for _, num, _ in moments] == [num for _, num in expected]
    assert [at_s for at_s, _, _ in moments] == pytest.approx([at_s for at_s, _ in expected])


def test_figures_are_those_of_the_wave_alone() -> None:
    """The first gang runs from 3 to 20 s. The wave begins at 25 s, and its gangs run 10 and 4 s."""
    moments = [(0.0, 0, 0), (3.0, 1, 0), (20.0, 0, 0), (28.0, 1, 0), (31.0, 2, 0), (35.0, 1, 0), (38.0, 0, 0)]
    run = Run(latencies_s=[9.0, 2.0, 4.0], moments=moments, num_starts=3).after(25.0, num_requests=1)
    figures = run.figures()
    assert figures["mean_latency_s"] == 3.0
    assert figures["gang_s"] == 14.0
    assert (figures["num_starts"], figures["most_gangs"]) == (2, 2)
