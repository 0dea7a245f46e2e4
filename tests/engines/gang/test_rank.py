"""The rank's own part of a gang's start, without Ray's."""

from __future__ import annotations

import time
from unittest.mock import patch

import pytest
import torch

from engines.gang.config import GangConfig, RankContext, RankParts
from engines.gang.rank import Rank
from engines.parallel.early_start import start_early
from tests.engines.gang.fakes import build_fake


def test_a_rank_is_not_built_before_its_early_start_is_over() -> None:
    over: list[bool] = []

    def connect() -> None:
        time.sleep(0.2)
        over.append(True)

    def build(context: RankContext) -> RankParts:
        start_early(torch.device("cpu"), connect)
        return build_fake(context)  # whose engine waits for nothing

    with patch("engines.parallel.early_start._started", None):
        rank = Rank(GangConfig(num_ranks=1, cpus_per_rank=1), 0)
        assert rank.build(build) == (1,)
        assert over


def test_an_early_start_that_failed_fails_the_build() -> None:
    def build(context: RankContext) -> RankParts:
        start_early(torch.device("cpu"), lambda: 1 / 0)
        return build_fake(context)

    with patch("engines.parallel.early_start._started", None), pytest.raises(ZeroDivisionError):
        Rank(GangConfig(num_ranks=1, cpus_per_rank=1), 0).build(build)
