"""Starts of gangs on new nodes are read from logs, and a run uses nodes of this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.new_node import (
    AGAIN,
    ALONE,
    COLD,
    FIRST,
    NEW,
    config_of,
    main,
    orders_of,
    parse,
    phase_table,
    start_of,
    summary_of,
)
from benchmarks.serving.settings import with_values
from deployments.cli.configuration import config_for
from engines.core.logs import MESSAGE

LINE = "INFO {time} controller 42 -- Starting Replica(id='{id}', deployment='{deployment}', app='troupe')."


def record(second: float, message: str = MESSAGE, **fields: object) -> dict[str, Any]:
    return {"time": f"2026-11-29T10:00:{second:06.3f}+00:00", "message": message, **fields}


def test_a_start_is_from_the_order_until_the_gang_is_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun_s = 1795946400.0  # 2026-11-29 10:00:00 UTC
    monkeypatch.setenv("TZ", "UTC")
    (tmp_path / "serve").mkdir()
    lines = [
        LINE.format(time="2026-11-29 09:59:00,000", id="a", deployment="Denoiser-m"),
        LINE.format(time="2026-11-29 10:00:01,500", id="b", deployment="Denoiser-m"),
        LINE.format(time="2026-11-29 10:00:01,600", id="c", deployment="VaeDecoder-m"),
    ]
    (tmp_path / "serve" / "controller_42.log").write_text("\n".join(lines))
    records = [
        record(3.0, phase="replica: process", took_s=1.0),
        record(5.0, phase="gang: load", took_s=1.5),
        record(7.5, "gang is ready"),
    ]
    found = start_of(records, orders_of(tmp_path), begun_s)
    assert found == {
        "until_order_s": 1.5,
        "until_process_s": 0.5,
        "start_s": 6.0,
        "phases_s": {"replica: process": 1.0, "gang: load": 1.5},
    }
    with pytest.raises(RuntimeError, match="one start expected"):
        start_of([*records, record(9.0, "gang is ready")], orders_of(tmp_path), begun_s)


def test_the_summary_has_medians_with_and_without_weights() -> None:
    def start(case: str, start_s: float, load_s: float) -> dict[str, Any]:
        return {"case": case, "start_s": start_s, "phases_s": {"gang: load": load_s}, "same_bytes": True}

    starts = [start(AGAIN, 4.0, 2.0), start(AGAIN, 5.0, 3.0), start(AGAIN, 9.0, 2.0), start(NEW, 10.0, 7.0)]
    assert summary_of(starts) == {
        "start_s": {AGAIN: 5.0, NEW: 10.0},
        "without_weights_s": {AGAIN: 2.0, NEW: 3.0},
        "ratio": {AGAIN: 1.0, NEW: 2.0},
        "ratio_without_weights": {AGAIN: 1.0, NEW: 1.5},
        "same_bytes": True,
    }
    assert not summary_of([{**starts[0], "same_bytes": False}])["same_bytes"]


def test_the_slowest_start_on_a_new_node_is_beside_the_median_of_warm_ones() -> None:
    """A start without the shared cache is slower, and ignored."""

    def start(case: str, start_s: float, **phases_s: float) -> dict[str, Any]:
        return {"case": case, "start_s": start_s, "phases_s": phases_s}

    starts = [
        *(start(AGAIN, took_s, load=took_s - 1, engine=1.0) for took_s in (6.0, 9.0, 7.0)),
        start(NEW, 8.0, load=5.0, engine=2.5, compile=1.0),
        start(NEW, 10.0, load=6.5, engine=3.25, compile=0.5),
        start(ALONE, 20.0, load=6.0, engine=9.0),
    ]
    header, *rows = phase_table(starts).splitlines()
    assert header.split() == ["phase,", "s", *AGAIN.split(), *NEW.split(), "difference"]
    assert [row.split() for row in rows] == [
        ["engine", "1.00", "3.25", "+2.25"],
        ["load", "6.00", "6.50", "+0.50"],
        ["compile", "0.00", "0.50", "+0.50"],
        ["start", "7.00", "10.00", "+3.00"],
    ]


def test_a_gang_finds_no_room_on_the_head() -> None:
    config, num_cpus = config_of(parse(["flux-shapes", "--set", "denoiser.strategy=ulysses"]))
    (model,) = config.app.models
    assert model.denoiser.cpus_per_rank > num_cpus
    stages = model.text_encoder.num_cpus + model.decoder.num_cpus
    assert config.app.api.num_cpus + stages < num_cpus
    assert model.denoiser.autoscaling is not None
    assert model.denoiser.autoscaling.min_replicas == 0
    plain = with_values(config_for("flux-shapes", 1), ["denoiser.strategy=ulysses"]).app.models[0]
    assert (model.stages, model.denoiser.strategy) == (plain.stages, plain.denoiser.strategy)


def test_no_repeats_are_refused_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    """The summary would fail after all starts."""
    with pytest.raises(SystemExit):
        parse(["flux-shapes", "--repeats", "0"])
    assert "--repeats is 0" in capsys.readouterr().err


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_gang_starts_on_new_nodes_and_makes_the_same_picture(capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["flux-shapes", "--repeats", "1"])
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert status == 0, document
    *starts, summary = document["results"]
    assert [one["case"] for one in starts] == [FIRST, AGAIN, NEW, COLD, ALONE]
    assert summary["same_bytes"]
