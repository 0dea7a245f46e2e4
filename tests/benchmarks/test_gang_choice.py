"""The program that measures a router's choice among many gangs."""

from __future__ import annotations

import json
from random import Random

import pytest

from benchmarks import gang_choice
from engines.gang.load import NewWork


def test_the_board_knows_all_gangs_and_ranks_them() -> None:
    names = [f"gang{number}" for number in range(7)]
    ranked = gang_choice.board_of(7, Random(1)).choose(names, "job", NewWork("1024x1024", 28), 0.0)
    assert sorted(ranked) == names, "a board that does not know a gang ranks none"


def test_the_last_line_is_one_document(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["gang_choice", "--gangs", "3", "--choices", "5"])
    gang_choice.main()
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (document["gangs"], document["choices"]) == (3, 5)
    assert 0.0 < document["median_ms"] <= document["p99_ms"]
