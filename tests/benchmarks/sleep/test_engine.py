"""The benchmark of sleeping weights, with a model for a CPU."""

from __future__ import annotations

import json

import pytest

from benchmarks.sleep.__main__ import main
from tests.engines.support.rank_resources import separate_rank_resources


def test_a_small_model_sleeps_and_wakes_with_the_same_bits(capsys: pytest.CaptureFixture[str]) -> None:
    with separate_rank_resources():
        status = main(["engine", "--small", "--side", "32", "--rounds", "1", "--precisions", "native"])
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert status == 0, document
    (result,) = document["results"]
    assert (result["same_bits"], result["control_differs"], result["copies_to_host"]) == (True, True, 1)
    assert result["weights_gib"] > 0
