"""Policies run in turn. Lone times are measured before the first, and each row is written at once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.load import __main__ as program
from benchmarks.load import alone as lone
from benchmarks.load.alone import read
from benchmarks.load.client import Outcome
from benchmarks.load.mix import NUM_DIGITS, Arrival, Owner, load_mix
from deployments.config import ServeConfig
from deployments.usage.api_keys import hash_of
from deployments.usage.quotas import KeyLimits

ALONE_S = 0.6
TRACE = '{"at_s": 0, "class": "small"}\n{"at_s": 1, "class": "usual"}\n'


class Served:
    """Records the calls of simulated applications. Under the policy ``cut_off`` the load is interrupted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cut_off: str = "") -> None:
        self.policies: list[str] = []
        self.measured: list[str] = []
        self.made_ready: list[str] = []
        self.sent: list[list[Any]] = []
        self.keys: dict[str, KeyLimits] = {}
        self.owners: list[Owner | None] = []
        self._cut_off = cut_off
        for module, name in ((program, "serving"), (program, "send_all"), (lone, "measured")):
            monkeypatch.setattr(module, name, getattr(self, f"_{name}"))
        monkeypatch.setattr(program, "text_of", lambda metrics: "")

    @contextmanager
    def _serving(self, config: ServeConfig, data_dir: Path, keys: tuple[str, ...]) -> Iterator[Any]:
        assert data_dir.is_dir()
        self.keys = dict(zip(keys, config.app.api.key_limits, strict=True))
        assert all(model.denoiser.elastic for model in config.app.models)
        self.policies.append(config.app.models[0].denoiser.policy)
        self.is_at_rest = False
        yield SimpleNamespace(url="", ready_s=1.0, data_dir=data_dir, rest=self._rest)

    def _rest(self) -> None:
        self.is_at_rest = True

    async def _measured(self, url: str, kinds: list[Any], headers: dict[str, str], num: int = 3) -> dict[str, float]:
        self._check(headers)
        if not num:
            self.made_ready.append(",".join(kind.name for kind in kinds))
            return {}
        self.measured += [kind.name for kind in kinds]
        return {kind.name: ALONE_S for kind in kinds}

    def _check(self, headers: dict[str, str]) -> None:
        """Check that requests have a key if the server has keys, and come when it is at rest."""
        assert self.is_at_rest
        sent = headers.get("Authorization", "").removeprefix("Bearer ")
        assert sent in self.keys if self.keys else not headers

    async def _send_all(self, url: str, arrivals: list[Arrival], headers: dict[str, str]) -> list[Outcome]:
        self._check(headers)
        self.owners = [one.owner for one in arrivals]
        if self.policies[-1] == self._cut_off:
            raise KeyboardInterrupt
        self.sent.append([one.kind.body.get("deadline_s") for one in arrivals])
        return [
            Outcome(
                name=one.kind.name,
                owner=one.owner.name if one.owner else "",
                at_s=one.at_s,
                late_s=0.0,
                latency_s=1.0,
                status=200,
            )
            for one in arrivals
        ]


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    (tmp_path / "trace").write_text(TRACE)
    return ["--trace", str(tmp_path / "trace"), "--set", "denoiser.elastic=true", "--out", str(tmp_path / "out")]


def test_policies_follow_each_other(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    served = Served(monkeypatch)
    program.main([*words, "--policies", "arrival,deadline", "--scale", "2"])
    assert served.policies == ["arrival", "deadline"]
    assert (served.measured, served.made_ready) == (["small", "usual"], ["", "small,usual"])
    assert served.sent == [[None, None], [pytest.approx(1.2)] * 2]
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [(row["policy"], row["attainment"]) for row in document["rows"]] == [("arrival", 1.0), ("deadline", 1.0)]
    assert json.loads((tmp_path / "out").read_text()) == document
    assert read(tmp_path / "out") == {"small": ALONE_S, "usual": ALONE_S}


def test_requests_come_with_keys_whose_weights_the_server_knows(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    served = Served(monkeypatch)
    program.main([*words, "--policies", "fair", "--owners", "three"])
    assert {limits.key: limits.weight for limits in served.keys.values()} == {
        hash_of(f"benchmark-{name}")[:NUM_DIGITS]: weight
        for name, weight in (("greedy", 1), ("small", 1), ("paying", 2))
    }
    assert all(owner is not None and owner.key in served.keys for owner in served.owners)
    row = json.loads(capsys.readouterr().out.splitlines()[-1])
    names = {owner.name for owner in served.owners if owner is not None}
    assert row["policy"] == "fair"
    assert row["owners"].keys() == names
    assert sum(one["right"] for one in row["owners"].values()) == 2
    program.main([*words, "--policies", "fair", "--owners", "none"])
    assert (served.keys, served.owners) == ({}, [None, None])


def test_a_load_is_beside_what_classes_take_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A lone request takes 0.6 s: 300 s at load 0.5 are some 250 requests, under every policy."""
    served = Served(monkeypatch)
    words = ["--load", "0.5", "1", "--duration-s", "300", "--set", "denoiser.elastic=true"]
    program.main([*words, "--policies", "shortest,arrival"])
    assert served.measured == [one.name for one in load_mix("laptop").classes], "all classes"
    assert served.policies == ["shortest", "arrival"], "one application for all loads"
    half, whole, *others = map(len, served.sent)
    assert (half, whole) == pytest.approx((250, 500), rel=0.2)
    assert others == [half, whole]
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["offered"] for row in document["rows"]] == [0.5, 1.0, 0.5, 1.0]


def test_a_run_that_was_cut_off_is_gone_on_with(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Served(monkeypatch, cut_off="deadline")
    with pytest.raises(KeyboardInterrupt):
        program.main([*words, "--policies", "arrival,deadline"])
    assert [row["policy"] for row in json.loads((tmp_path / "out").read_text())["rows"]] == ["arrival"]
    served = Served(monkeypatch)
    program.main([*words, "--policies", "deadline", "--alone", str(tmp_path / "out")])
    assert (served.measured, served.made_ready) == ([], ["small,usual"])


def test_unknown_policies_are_refused_before_anything_starts(words: list[str]) -> None:
    with pytest.raises(SystemExit):
        program.parse([*words, "--policies", "shortest,longest"])
