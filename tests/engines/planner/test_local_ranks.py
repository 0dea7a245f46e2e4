"""Ranks outside a gang answer, raise errors and end."""

from __future__ import annotations

import time
from multiprocessing.connection import Connection

import psutil
import pytest

from engines.planner.measure import local_ranks
from tests.support.patience import PATIENCE_S
from tests.support.processes import cmdline


def sends_its_arguments(rank: int, answer: Connection, *args: object) -> None:
    if rank == 0:
        answer.send(args)


def fails_at_rank_one(rank: int, answer: Connection) -> None:
    if rank == 1:
        raise ValueError("no such device\nas rank 1 wants")
    time.sleep(600)


def says_nothing(rank: int, answer: Connection) -> None:
    pass


def hangs(rank: int, answer: Connection) -> None:
    time.sleep(600)


def spawned() -> list[psutil.Process]:
    return [child for child in psutil.Process().children(recursive=True) if "spawn_main" in " ".join(cmdline(child))]


@pytest.mark.slow
def test_rank_zero_answers() -> None:
    with local_ranks(sends_its_arguments, 2, ("a", 1)) as ranks:
        assert ranks.answer(PATIENCE_S) == ("a", 1)
        ranks.leave(PATIENCE_S)
        assert not any(process.is_alive() for process in ranks.context.processes)


def test_what_a_rank_dies_of_is_the_error_and_no_other_stays() -> None:
    with pytest.raises(RuntimeError, match=r"^as rank 1 wants$"), local_ranks(fails_at_rank_one, 2) as ranks:
        ranks.answer(PATIENCE_S)
    assert not spawned()


@pytest.mark.slow
def test_ranks_that_end_without_an_answer_are_an_error() -> None:
    with (
        pytest.raises(RuntimeError, match="all 1 ranks ended without an answer"),
        local_ranks(says_nothing, 1) as ranks,
    ):
        ranks.answer(PATIENCE_S)


def test_ranks_that_take_too_long_are_ended() -> None:
    with pytest.raises(TimeoutError, match="no answer from 1 ranks in 0 s"), local_ranks(hangs, 1) as ranks:
        ranks.answer(0.1)
    assert not spawned()
