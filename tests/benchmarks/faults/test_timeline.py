"""Timeline of a recovery from a made-up log."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from benchmarks.faults.timeline import Record, inside, rank_pids, records_of, spans
from engines.core import logs

FAULT_S = 1_700_000_000.0


def line(after_s: float, message: str, **fields: Any) -> dict[str, Any]:
    return {"time": datetime.fromtimestamp(FAULT_S + after_s, UTC).isoformat(), "message": message, **fields}


def phase(after_s: float, name: str, took_s: float, **fields: Any) -> dict[str, Any]:
    return line(after_s, logs.MESSAGE, phase=name, took_s=took_s, **fields)


RECORDS = [
    phase(-60.0, "gang: build", 9.0, model="m"),  # the gang before
    line(0.5, "request r lost its gang (1): rank 1 died"),
    phase(3.0, "replica: process", 2.0, model="m"),
    phase(3.5, "gang: processes", 0.5, model="another"),
    phase(4.0, "gang: processes", 1.0, model="m"),
    phase(4.5, "gang: connect", 0.5, model="m"),
    phase(5.0, "rank: weights", 0.25, rank=1),
    phase(5.5, "rank: weights", 1.0, rank=0),
    phase(6.0, "gang: load", 1.5, model="m"),
    phase(7.0, "gang: build", 1.0, model="m"),
]


def test_parts_follow_each_other_from_the_fault_to_the_answer() -> None:
    parts = spans(RECORDS, "m", FAULT_S, first_step_s=FAULT_S + 7.5, end_s=FAULT_S + 12.0)
    assert [part.until_s for part in parts] == [0.5, 3.0, 4.0, 4.5, 6.0, 7.0, 7.5, 12.0]
    assert [part.from_s for part in parts] == [0.0, *(part.until_s for part in parts[:-1])]
    assert sum(part.took_s for part in parts) == 12.0
    assert inside(RECORDS, FAULT_S, FAULT_S + 12.0) == {"rank: weights": 1.0}, "the slowest rank's"


def test_a_log_without_a_part_is_no_timeline() -> None:
    with pytest.raises(ValueError, match="nothing of the phase gang: load after the fault"):
        spans([one for one in RECORDS if one.get("phase") != "gang: load"], "m", FAULT_S, FAULT_S + 8, FAULT_S + 12)


def test_lines_of_all_processes_are_in_order(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    for name, records in {"worker-1.err": RECORDS[1::2], "old/worker-2.err": RECORDS[::2]}.items():
        (tmp_path / name).write_text("Ray says something\n" + "".join(f"{json.dumps(one)}\n" for one in records))
    read: list[Record] = records_of(tmp_path)
    assert read == RECORDS


def test_ranks_are_those_of_the_newest_gang(tmp_path: Path) -> None:
    ready = [line(after_s, "gang is ready", model="m", pids=pids) for after_s, pids in ((1.0, [1, 2]), (2.0, [3, 4]))]
    (tmp_path / "worker-1.err").write_text("".join(f"{json.dumps(one)}\n" for one in (*ready, *RECORDS)))
    assert rank_pids(tmp_path, "m") == [3, 4]
    with pytest.raises(RuntimeError, match="no gang of another was ready"):
        rank_pids(tmp_path, "another")
