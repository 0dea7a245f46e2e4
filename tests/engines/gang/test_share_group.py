"""A share group decides which member loads, orders states until all follow, and tracks host memory and lost members."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest

from engines.core.resources import MemoryUse
from engines.gang.arbiter import IDLE, Demand
from engines.gang.share_group import LOAD_PAUSE_S, REPLACED_SILENT_S, SILENT_S, ShareGroup, ShareReport, State

GIB = 2**30
WORK = Demand(backlog_s=2.0)


@dataclass(kw_only=True)
class Member:
    """A deployment of a model that follows orders when a test lets it."""

    group: ShareGroup
    model: str
    stage: str = "denoiser"
    token: str = ""
    gib: Sequence[float] = (40.0,)
    devices: Sequence[str] = ("gpu-0",)
    peak: float = 1.0
    report: ShareReport = field(init=False)

    def __post_init__(self) -> None:
        self.report = ShareReport(
            model=self.model, stage=self.stage, token=self.token or f"{self.model} {self.stage}", state="waiting"
        )

    def say(self, now_s: float, **changes: object) -> State:
        """Report; return the order."""
        self.report = replace(self.report, **changes)  # type: ignore[arg-type]
        return self.group.hear(self.report, now_s).state

    def loads(self, now_s: float) -> None:
        assert self.say(now_s) == "loading"
        self.say(now_s, state="loading")
        uses = tuple(
            MemoryUse(
                device=device, device_bytes=80 * GIB, weights=int(gib * GIB), beside=GIB, peak=int(self.peak * GIB)
            )
            for device, gib in zip(self.devices, self.gib, strict=True)
        )
        self.say(now_s, state="awake", uses=uses)

    def follows(self, now_s: float) -> State:
        """Reach the ordered state at once."""
        state = self.say(now_s)
        return state if state == self.report.state else self.say(now_s, state=state)


def loaded(group: ShareGroup, *members: Member, now_s: float = 0.0) -> None:
    """Let all load one after the other, with those before them asleep."""
    for i, member in enumerate(members):
        for other in members[:i]:
            member.say(now_s)
            other.follows(now_s)
        member.loads(now_s)


def test_models_load_one_at_a_time_while_all_others_are_asleep() -> None:
    group = ShareGroup()
    a, a_encoder, b = (
        Member(group=group, model="a"),
        Member(group=group, model="a", stage="x"),
        Member(group=group, model="b"),
    )
    assert [one.say(0.0) for one in (a, b, a_encoder)] == ["loading", "waiting", "loading"]
    a.loads(1.0)
    assert b.say(1.0) == "waiting", "a's encoder loads"
    a_encoder.loads(2.0)
    assert b.say(2.0) == "waiting"
    assert [a.say(2.0), a_encoder.say(2.0)] == ["asleep", "asleep"]
    a.say(3.0, state="asleep")
    assert b.say(3.0) == "waiting", "one of two is still there"
    a_encoder.say(4.0, state="asleep")
    assert b.say(4.0) == "loading"
    b.say(5.0, state="loading")
    assert a.say(5.0, demand=WORK) == "asleep", "no model wakes beside one of unknown size"


def test_a_model_with_work_wakes_up_once_the_other_is_wholly_asleep() -> None:
    group = ShareGroup()
    a, b, decoder = (
        Member(group=group, model=model, stage=stage) for model, stage in (("a", "1"), ("b", "1"), ("b", "2"))
    )
    decoder.gib = (1.0,)
    loaded(group, a)
    for other in (b, decoder):
        other.say(0.0)
    a.follows(0.0)
    for other in (b, decoder):
        other.loads(0.0)
    assert (a.report.state, b.report.state) == ("asleep", "awake")
    assert a.say(1.0, demand=WORK) == "asleep", "b may still have work for its decoder"
    assert [b.say(1.3), decoder.say(1.3)] == ["asleep", "asleep"]
    b.say(1.4, state="asleep")
    assert a.say(1.4) == "asleep"
    decoder.say(1.5, state="asleep")
    assert a.say(1.5) == "awake"
    assert a.say(2.0, state="awake") == "awake"
    assert group.awake == ("a",)


def test_an_encoder_without_work_wakes_up_after_the_gang_of_its_model() -> None:
    """The conditioning was in the cache, so only the gang's weights use the bus."""
    group = ShareGroup()
    gang, encoder = Member(group=group, model="a"), Member(group=group, model="a", stage="text_encoder", gib=(10.0,))
    other = Member(group=group, model="b")
    gang.say(0.0)
    encoder.say(0.0)
    for one in (gang, encoder):
        one.loads(0.0)
    other.say(0.0)
    for one in (gang, encoder):
        one.follows(0.0)
    other.loads(0.0)
    gang.say(1.0, demand=WORK)
    other.follows(2.0)
    assert [gang.say(2.0), encoder.say(2.0)] == ["awake", "asleep"]
    assert encoder.say(2.1, demand=WORK) == "awake", "another prompt came"
    assert encoder.say(2.2, demand=IDLE) == "asleep"
    gang.say(3.0, state="awake")
    assert encoder.say(3.0) == "awake"


def test_an_order_says_how_long_a_model_will_sleep() -> None:
    group = ShareGroup()
    a, b = (Member(group=group, model=model) for model in "ab")
    loaded(group, a, b)
    later_s = LOAD_PAUSE_S + 1
    b.say(later_s, demand=Demand(backlog_s=5.0), swap_s=2.0)
    a.say(later_s, swap_s=2.0)
    assert group.order(a.report, later_s).wake_s == 2.0, "b's turn has been long enough"
    assert group.order(b.report, later_s).wake_s == 0.0
    assert group.order(Member(group=group, model="new").report, later_s).wake_s == 0.0


def test_those_that_fit_are_awake_together() -> None:
    group = ShareGroup()
    a, b = Member(group=group, model="a", gib=(30.0,)), Member(group=group, model="b", gib=(30.0,))
    loaded(group, a, b)
    assert a.say(1.0, demand=WORK) == "awake"
    a.follows(1.0)
    assert b.say(1.0) == "awake"


def test_memory_beside_weights_counts_awake_and_asleep() -> None:
    """76 GiB are usable for twice 36.3 GiB of weights, twice 1 GiB beside them, and two CUDA contexts of 0.6 GiB."""
    for gib, state in ((36.3, "awake"), (36.5, "asleep")):
        group = ShareGroup()
        a, b = (Member(group=group, model=model, gib=(gib,)) for model in "ab")
        loaded(group, a, b)
        assert a.say(1.0, demand=WORK) == state


def test_memory_that_work_takes_for_moments_counts_before_the_first_sleep() -> None:
    """Twice 36 GiB of weights fit 76 with 1 beside each, but not if steps take 4: both may run at once."""
    for peak, state in ((1.0, "awake"), (4.0, "asleep")):
        group = ShareGroup()
        a, b = (Member(group=group, model=model, gib=(36.0,), peak=peak) for model in "ab")
        loaded(group, a, b)
        assert a.say(1.0, demand=WORK) == state


def test_a_model_may_load_if_it_fits_but_for_the_moments_of_its_work() -> None:
    group = ShareGroup()
    loaded(group, Member(group=group, model="a", gib=(74.0,), peak=9.0))


def test_a_process_that_is_replaced_loads_again_when_work_allows_it() -> None:
    group = ShareGroup()
    a, b = (Member(group=group, model=model) for model in "ab")
    loaded(group, a, b)
    assert b.say(1.0, demand=WORK) == "awake"
    new = Member(group=group, model="a", token="new")
    assert new.say(1.0) == "waiting"
    assert b.say(1.0) == "awake", "another load had just been"
    later_s = LOAD_PAUSE_S + 0.1
    assert new.say(later_s) == "waiting"
    assert b.follows(later_s) == "asleep"
    assert new.say(later_s) == "loading"


@pytest.mark.parametrize("is_new_arbiter", [False, True])
def test_a_process_that_is_replaced_keeps_the_devices_until_it_ends(is_new_arbiter: bool) -> None:
    """Serve starts the next replica while the last one finishes its requests."""
    group = ShareGroup()
    a, b = (Member(group=group, model=model) for model in "ab")
    loaded(group, b, a)
    assert a.say(1.0, demand=WORK) == "awake"
    new = Member(group=group, model="a", token="new")
    assert new.say(1.2) == "waiting"
    if is_new_arbiter:
        a.group = b.group = new.group = group = ShareGroup()
        assert new.say(1.2) in ("waiting", "loading"), "it knows no other yet"
    assert a.say(1.3) == "awake", "it ends its jobs"
    assert b.say(1.4, demand=WORK) == "asleep"
    for now_s in (4.0, 7.0, 10.0, LOAD_PAUSE_S + 3.0):
        assert [a.say(now_s), b.say(now_s), new.say(now_s)] == ["awake", "asleep", "waiting"]
    group.forget(a.report.token, 13.1)
    assert new.say(13.1) == "loading"


def test_a_process_that_was_taken_for_the_older_one_follows_orders_once_that_has_ended() -> None:
    """A new arbiter cannot tell two that have loaded apart."""
    group = ShareGroup()
    newer, b = (Member(group=group, model=model) for model in "ab")
    loaded(group, b, newer)
    older = Member(group=group, model="a", token="older")
    older.report = replace(newer.report, token="older", state="asleep")
    assert older.say(1.0) == "asleep"
    assert newer.say(1.0, demand=WORK) == "awake"
    group.forget("older", 1.1)
    assert newer.say(1.2, demand=IDLE) == "awake"
    assert b.say(2.0, demand=WORK) == "asleep"
    assert newer.follows(2.1) == "asleep"
    assert b.say(2.2) == "awake"


def test_a_process_that_died_and_is_replaced_is_not_waited_for_long() -> None:
    group = ShareGroup()
    a = Member(group=group, model="a")
    loaded(group, a)
    new = Member(group=group, model="a", token="new")
    assert new.say(1.0) == "waiting"
    assert new.say(REPLACED_SILENT_S + 0.1) == "loading"


def test_one_that_is_silent_is_gone() -> None:
    group = ShareGroup()
    a, b = (Member(group=group, model=model) for model in "ab")
    loaded(group, a, b)
    assert a.say(1.0, demand=WORK) == "asleep"
    for now_s in (8.0, 16.0, SILENT_S + 0.1):
        order = a.say(now_s)
    assert order == "awake", "b was awake, and its memory is free now"


def test_a_new_arbiter_knows_all_from_the_next_reports() -> None:
    group = ShareGroup(host_bytes=50 * GIB)
    a, b = (Member(group=group, model=model) for model in "ab")
    loaded(group, a, b)
    for one in (a, b):
        one.report = replace(one.report, pinned=group.order(one.report, 9.0).pinned)
    a.group = b.group = new = ShareGroup(host_bytes=50 * GIB)
    assert b.say(1.0, demand=WORK) == "awake"
    assert a.say(1.0) == "asleep"
    assert b.say(1.1) == "awake"
    assert new.pinned_bytes == group.pinned_bytes == 50 * GIB


def test_a_new_arbiter_lets_no_model_onto_the_devices_before_all_have_reported() -> None:
    """A model that is awake may report after one that waits for its memory, or for its turn to load."""
    group = ShareGroup()
    a, b = (Member(group=group, model=model) for model in "ab")
    loaded(group, a, b)
    new = ShareGroup(quiet_until_s=5.0)
    for one in (a, b):
        one.group = new
    c = Member(group=new, model="c")
    assert a.say(1.0, demand=WORK) == "asleep", "b is awake"
    assert c.say(1.1) == "waiting", "b is awake"
    assert b.say(2.0) == "awake"
    assert new.next_s(3.0) is not None
    assert [a.say(5.1), b.follows(5.1), c.say(5.2)] == ["asleep", "asleep", "loading"]


def test_host_memory_is_granted_up_to_its_limit() -> None:
    group = ShareGroup(host_bytes=50 * GIB)
    a, b = Member(group=group, model="a", gib=(20.0, 20.0), devices=("gpu-0", "gpu-1")), Member(group=group, model="b")
    loaded(group, a, b)
    assert group.order(a.report, 9.0).pinned == (20 * GIB, 20 * GIB)
    assert group.order(b.report, 9.0).pinned == (10 * GIB,)
    new = Member(group=group, model="a", token="new")
    new.say(0.1)
    assert group.pinned_bytes == 10 * GIB, "ended processes pin nothing"
    assert ShareGroup().order(a.report, 9.0).pinned is None


def test_a_process_that_loads_is_granted_memory_before_it_reports_it() -> None:
    """A process whose weights grow gets more, and one whose weights shrink less, within the limit."""
    group = ShareGroup(host_bytes=50 * GIB)
    a, b = (Member(group=group, model="a", stage=stage) for stage in ("denoiser", "decoder"))
    assert [one.say(0.0) for one in (a, b)] == ["loading", "loading"]
    assert group.grant(a.report.token, [30 * GIB]) == (30 * GIB,)
    assert group.grant(b.report.token, [30 * GIB]) == (20 * GIB,), "both load at once"
    a.report = replace(a.report, pinned=(30 * GIB,))
    a.say(0.1, state="loading")
    assert group.pinned_bytes == 50 * GIB
    a.group = ShareGroup(host_bytes=50 * GIB)
    a.say(0.2)
    assert a.group.pinned_bytes == 30 * GIB, "a new arbiter learns it"
    a.group, use = group, MemoryUse(device="gpu-0", device_bytes=80 * GIB, weights=10 * GIB, beside=GIB)
    a.say(0.3, state="awake", uses=(use,), pinned=None)
    assert group.order(a.report, 0.3).pinned == (10 * GIB,)
    assert group.grant(b.report.token, [45 * GIB]) == (40 * GIB,)
    assert ShareGroup().grant("any", [GIB]) is None


def test_ranks_on_other_devices_are_an_error() -> None:
    group = ShareGroup()
    a = Member(group=group, model="a", gib=(20.0, 20.0), devices=("gpu-0", "gpu-1"))
    loaded(group, a)
    b = Member(group=group, model="b", gib=(20.0,), devices=("gpu-1",))
    b.say(0.0)
    a.follows(0.0)
    with pytest.raises(ValueError, match="ranks of b are on gpu-1 and those of a on gpu-0, gpu-1"):
        b.loads(0.0)


def test_limits_of_the_configuration_hold_on_a_cpu() -> None:
    group = ShareGroup(memory_bytes=50 * GIB)
    a, b = (Member(group=group, model=model, gib=(30.0,), devices=("cpu",)) for model in "ab")
    loaded(group, a, b)
    assert a.say(1.0, demand=WORK) == "asleep"
    assert b.say(1.0, demand=IDLE) == "asleep"
