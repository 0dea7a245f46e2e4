"""A rank starts, without Ray."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch

from engines.core.engine import RankContext
from engines.gang.gang_config import BuildRank, GangConfig
from engines.gang.rank import Rank
from engines.parallel.early_start import start_early
from tests.engines.gang.support.fakes import FakeRequest, fake_job, load_fake
from tests.engines.support.rank_resources import separate_rank_resources


def test_a_rank_answers_a_ping_before_it_imports_anything_large() -> None:
    """Pings find a rank that hangs while it imports: an actor answers none before it is made."""
    made = "from engines.gang.rank import Rank; rank = Rank(GangConfig(num_ranks=2, cpus_per_rank=1), 1)"
    check = "import sys; assert 'torch' not in sys.modules; assert rank.ping() == 1"
    command = f"from engines.gang.gang_config import GangConfig; {made}; {check}"
    subprocess.run([sys.executable, "-c", command], check=True)


def test_a_rank_is_not_built_before_its_early_start_is_over() -> None:
    over: list[bool] = []

    def work(_: torch.device) -> None:
        time.sleep(0.2)
        over.append(True)

    def load(context: RankContext) -> BuildRank:
        start_early(torch.device("cpu"))
        return load_fake(context)  # its engine waits for nothing

    with separate_rank_resources(), patch("engines.parallel.early_start._warm_up_kernels", work):
        rank = Rank(GangConfig(num_ranks=1, cpus_per_rank=1), 0)
        rank.open()
        rank.load(load)
        assert rank.build().team_sizes == (1,)
        assert over


def test_an_early_start_that_failed_fails_the_build() -> None:
    def load(context: RankContext) -> BuildRank:
        start_early(torch.device("cpu"))
        return load_fake(context)

    broken = patch("engines.parallel.early_start._warm_up_kernels", side_effect=ZeroDivisionError)
    with separate_rank_resources(), broken:
        rank = Rank(GangConfig(num_ranks=1, cpus_per_rank=1), 0)
        rank.open()
        rank.load(load)
        with pytest.raises(ZeroDivisionError):
            rank.build()


@pytest.mark.parametrize(("error", "is_logged"), [(ValueError("no such adapter"), False), (KeyError("a defect"), True)])
def test_a_defect_of_an_admission_leaves_its_traceback(
    error: Exception, is_logged: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The answer has none, since pickling drops it; a wrong request needs none."""
    rank: Any = Rank(GangConfig(num_ranks=1, cpus_per_rank=1), 0)
    rank._runner = Mock(admit=Mock(side_effect=error), load_addition=Mock(side_effect=error))
    failure = rank.admit(fake_job("job-1", FakeRequest(seed=1, num_steps=1)))
    assert failure is not None
    assert (failure.error, rank.load_addition("ink")) == (error, error)
    assert [record.exc_info and record.exc_info[1] for record in caplog.records] == 2 * is_logged * [error]
