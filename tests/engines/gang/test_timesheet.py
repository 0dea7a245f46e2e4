"""What a job is said to have taken of its ranks, beside what their devices worked for it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from benchmarks.policies.h200 import STEPS
from engines.gang import gang as gang_module
from engines.gang.config import GangConfig
from engines.gang.eta.step_times import StepTimes
from engines.gang.jobs.job import Job, JobDone, JobEvent, StepDone
from tests.engines.gang.support.checks import metric
from tests.engines.gang.support.fakes import FakeRequest, fake_job
from tests.engines.gang.support.helpers import run
from tests.engines.gang.support.virtual_time import GpuRanks, run_in_virtual_time, virtual_gang

NUM_STEPS = 28
NEAR = 0.02
CLIP = {"clip": {1: 6.0, 2: 3.1}}
ALL = {**STEPS, **CLIP}
SMALL, MIDDLE, LARGE = STEPS
PAIR = GangConfig(num_ranks=2, gpus_per_rank=1.0)


@pytest.fixture(autouse=True)
def no_ranks_to_kill(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gang_module, "kill_ranks", lambda _: None)


@dataclass(frozen=True, kw_only=True)
class Request:
    """``leaves_s`` after it came, it is cancelled."""

    at_s: float
    shape: str
    leaves_s: float | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)

    def job(self, job_id: str) -> Job:
        request = FakeRequest(seed=1, num_steps=NUM_STEPS)
        return fake_job(job_id, request, shape=self.shape, **self.fields)


@dataclass
class Seen:
    """``gpu_s`` is what jobs that were done are said to have taken, ``left_s`` those whose requests went away, and
    ``rank_s`` what devices worked for each job. ``so_far_s`` is what was said with each step."""

    gpu_s: dict[str, float] = field(default_factory=dict)
    left_s: dict[str, float] = field(default_factory=dict)
    so_far_s: dict[str, list[float]] = field(default_factory=dict)
    rank_s: dict[str, float] = field(default_factory=dict)
    step_ms: dict[str, list[float | None]] = field(default_factory=dict)
    counted_s: float = 0.0


def known_times() -> StepTimes:
    known = StepTimes()
    for shape, by_size in ALL.items():
        for size in PAIR_SIZES:
            for _ in range(2):
                known.note(fake_job("known", FakeRequest(seed=0, num_steps=2), shape=shape), size, by_size[size])
    assert known.changed()
    return known


PAIR_SIZES = (1, PAIR.num_ranks)


def counted_s(model: str) -> float:
    """What the metrics say of ranks in steps."""
    labels = [{"model": model, "num_ranks": str(size)} for size in PAIR_SIZES]
    return sum(int(each["num_ranks"]) * metric("troupe_step_seconds_sum", **each) for each in labels)


async def _seen(requests: Sequence[Request], config: GangConfig, known: StepTimes) -> Seen:
    seen, before_s = Seen(), counted_s("seen")
    ranks = GpuRanks(config.num_ranks, ALL, {str(number): one.shape for number, one in enumerate(requests)})

    async with virtual_gang(config, ranks, model="seen", step_times=known) as gang:

        async def one(number: int, request: Request) -> None:
            await asyncio.sleep(request.at_s)
            name, events = str(number), list[JobEvent]()
            try:
                async with asyncio.timeout(request.leaves_s):
                    events = await run(gang, request.job(name))
            except TimeoutError:
                seen.left_s[name] = await gang.spent_s(name)
                return
            (seen.gpu_s[name],) = (event.gpu_s for event in events if isinstance(event, JobDone))
            seen.step_ms[name] = [event.step_ms for event in events if isinstance(event, StepDone)]
            seen.so_far_s[name] = [event.gpu_s for event in events if isinstance(event, StepDone)]

        await asyncio.gather(*(one(number, request) for number, request in enumerate(requests)))
    seen.rank_s, seen.counted_s = dict(ranks.rank_s), counted_s("seen") - before_s
    return seen


def seen_of(*requests: Request, config: GangConfig = PAIR, known: StepTimes | None = None) -> Seen:
    return run_in_virtual_time(_seen(requests, config, known or known_times()))


def assert_told_right(seen: Seen) -> None:
    """Each job that was done, and all together."""
    told_s = seen.gpu_s | seen.left_s
    assert told_s == {job_id: pytest.approx(seen.rank_s[job_id], rel=NEAR) for job_id in told_s}
    assert seen.counted_s == pytest.approx(sum(seen.rank_s.values()), rel=NEAR)


@pytest.mark.parametrize("shape", ALL)
@pytest.mark.parametrize("is_known", [True, False])
def test_a_job_took_what_its_steps_took(shape: str, is_known: bool) -> None:
    """Also where its steps are not known before, and go out as soon as may be."""
    seen = seen_of(Request(at_s=0.0, shape=shape), known=known_times() if is_known else StepTimes())
    assert seen.rank_s["0"] == pytest.approx(2 * NUM_STEPS * ALL[shape][2]), "on both ranks"
    assert_told_right(seen)
    first, *others = seen.step_ms["0"]
    assert first is None, "its first step is under way"
    assert others == pytest.approx([1e3 * ALL[shape][2]] * (NUM_STEPS - 1), rel=0.1)
    step_s = 2 * ALL[shape][2]
    assert seen.so_far_s["0"] == pytest.approx([*(step_s * i for i in range(NUM_STEPS - 1)), seen.gpu_s["0"]], rel=0.1)


@pytest.mark.parametrize("shape", ["clip", LARGE])
def test_jobs_in_turns_are_told_apart(shape: str) -> None:
    """Two of different keys take turns of two seconds; steps of one are up to a hundred times those of the other."""
    requests = [Request(at_s=0.0, shape=one, fields={"key": one}) for one in (SMALL, shape)]
    seen = seen_of(*requests, config=GangConfig(num_ranks=2, gpus_per_rank=1.0, policy="fair"))
    assert len(seen.gpu_s) == 2
    assert_told_right(seen)


@pytest.mark.parametrize("elastic", [False, True])
@pytest.mark.parametrize("preview_steps", [frozenset[int](), frozenset({7, 14, 21})])
def test_jobs_whose_teams_change_are_told_apart(elastic: bool, preview_steps: frozenset[int]) -> None:
    """A rank that waits for the others of its team, or for a state to move, is at no step meanwhile."""
    shapes = [MIDDLE, SMALL, SMALL, "clip", SMALL, MIDDLE, LARGE, SMALL] * 3
    requests = [
        Request(at_s=3.7 * number, shape=shape, fields={"preview_steps": preview_steps})
        for number, shape in enumerate(shapes)
    ]
    seen = seen_of(*requests, config=GangConfig(num_ranks=2, gpus_per_rank=1.0, elastic=elastic))
    assert len(seen.gpu_s) == len(requests)
    assert_told_right(seen)


def test_a_gang_that_idles_works_for_nobody() -> None:
    seen = seen_of(*(Request(at_s=1000.0 * number, shape=SMALL) for number in range(3)))
    assert_told_right(seen)


@pytest.mark.parametrize("shape", ["clip", LARGE])
def test_what_a_cancelled_job_took_is_counted_and_is_not_the_next_ones(shape: str) -> None:
    """What its last step took is told as soon as that is over, before any other job comes."""
    left = Request(at_s=0.0, shape=shape, leaves_s=5.3 * ALL[shape][2])
    seen = seen_of(left, Request(at_s=1000.0, shape=SMALL))
    assert 5 * ALL[shape][2] < seen.rank_s["0"] / 2 < 8 * ALL[shape][2]
    assert (list(seen.left_s), list(seen.gpu_s)) == (["0"], ["1"])
    assert_told_right(seen)
