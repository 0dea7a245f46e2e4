"""Errors cross actors, and ranks must agree on them."""

from __future__ import annotations

import pickle
import threading

import pytest

from engines.gang.errors import GangBrokenError, QueueFullError, portable
from engines.gang.jobs.step_plan import JobFailure, StepReport
from engines.gang.ledger import agreed_failure


@pytest.mark.parametrize("error", [GangBrokenError("rank 1 died", "death", True), QueueFullError(32, 4.6)])
def test_errors_survive_pickling(error: Exception) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), vars(copy)) == (type(error), str(error), vars(error))


def test_the_name_of_a_replica_survives_pickling() -> None:
    error = GangBrokenError("rank 1 died", "death", True)
    error.replica = "a1b2"
    assert pickle.loads(pickle.dumps(error)).replica == "a1b2"


def test_the_queue_says_when_to_come_back() -> None:
    assert str(QueueFullError(32, 4.6)) == "32 jobs are waiting already; try again in about 5 s"
    assert str(QueueFullError(1, 0.2)) == "1 job is waiting already; try again in about 0 s"


class TwoArgumentsError(Exception):
    """Can be pickled but not unpickled."""

    def __init__(self, left: int, right: int) -> None:
        super().__init__(f"{left} and {right}")


@pytest.mark.parametrize("error", [TwoArgumentsError(1, 2), ValueError(threading.Lock())])
def test_what_does_not_pickle_is_told(error: Exception) -> None:
    told = portable(error)
    assert type(told) is RuntimeError
    assert str(told) == f"{type(error).__name__}: {error}"


def test_what_pickles_is_kept() -> None:
    error = ValueError("no")
    assert portable(error) is error


def reports(*errors: Exception | None, shared: bool = True) -> list[StepReport]:
    failures = [() if error is None else (JobFailure(job_id="a", error=error, shared=shared),) for error in errors]
    return [StepReport(rank=i, sequence=0, failures=failure) for i, failure in enumerate(failures)]


def test_ranks_that_fail_alike_fail_the_job() -> None:
    failure = agreed_failure("a", reports(ValueError("1"), ValueError("2")))
    assert failure is not None
    assert str(failure.error) == "1"
    assert agreed_failure("b", reports(ValueError("1"), ValueError("2"))) is None
    assert agreed_failure("a", reports(None, None)) is None


@pytest.mark.parametrize("told", [(ValueError("only here"), None), (ValueError("here"), KeyError("there"))])
def test_ranks_that_fail_differently_break_the_gang(told: tuple[Exception | None, ...]) -> None:
    with pytest.raises(GangBrokenError, match="ranks failed job a: ValueError"):
        agreed_failure("a", reports(*told))


def test_a_failure_of_the_lead_rank_alone_fails_the_job() -> None:
    assert agreed_failure("a", reports(ValueError("no preview"), None, shared=False)) is not None
