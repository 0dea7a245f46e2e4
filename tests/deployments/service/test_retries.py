"""A request that was accepted before waits out some refusals."""

from __future__ import annotations

import pytest
from ray.exceptions import RayActorError

from deployments.service.readiness import Readiness
from deployments.service.retries import Retries
from engines.gang.errors import DEADLINE, BreakCause, GangBrokenError, QueueFullError, TooLateError
from tests.deployments.support.fake_service import PICTURES

FULL = QueueFullError(4, 1.0)
WOULD_WAIT = TooLateError(0, 3.0, 63.0, "the longest wait, max_wait_s,", 60.0)
WOULD_BE_LATE = TooLateError(0, 3.0, 63.0, DEADLINE, 60.0)


@pytest.fixture
def retries() -> Retries:
    return Retries(PICTURES.request(model="m", prompt="a"), Readiness({"m": ()}))


@pytest.mark.parametrize("refusal", [FULL, WOULD_WAIT, WOULD_BE_LATE])
def test_who_comes_first_is_told_at_once(retries: Retries, refusal: QueueFullError) -> None:
    with pytest.raises(type(refusal)):
        retries.after_refusal(refusal)


@pytest.mark.parametrize("refusal", [FULL, WOULD_WAIT])
def test_who_lost_a_gang_waits_for_the_next_however_many_do(retries: Retries, refusal: QueueFullError) -> None:
    """All of its requests come to the new gang at one time."""
    retries.after(GangBrokenError("rank 1 died", "death", in_flight=True), num_steps_seen=1)
    retries.after_refusal(refusal)


@pytest.mark.parametrize(
    ("cause", "in_flight", "counts"), [("death", True, True), ("death", False, False), ("closed", True, False)]
)
def test_it_runs_alone_after_a_gang_that_may_have_broken_by_it(
    retries: Retries, cause: BreakCause, in_flight: bool, counts: bool
) -> None:
    assert not retries.exclusive
    retries.after(GangBrokenError("rank 1 died", cause, in_flight=in_flight), num_steps_seen=1)
    assert retries.exclusive is counts


@pytest.mark.parametrize("preempted", [False, True])
def test_a_node_that_is_taken_away_does_not_count(retries: Retries, preempted: bool) -> None:
    retries.after(RayActorError(preempted=preempted), num_steps_seen=1)
    assert retries.exclusive is not preempted


def test_who_lost_a_gang_does_not_wait_beyond_its_own_deadline(retries: Retries) -> None:
    retries.after(GangBrokenError("rank 1 died", "death", in_flight=True), num_steps_seen=1)
    with pytest.raises(TooLateError):
        retries.after_refusal(WOULD_BE_LATE)
