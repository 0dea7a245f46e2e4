"""The tables of docs/operate/cards.md are the output of their program."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from pipelines.loading import published_models
from tests.support.fenced import ROOT

DOCUMENT = ROOT / "docs" / "operate" / "cards.md"
COMMAND = "run PYTHONPATH=. python .ci/models_cards.py"
HELD = "FLUX.2-klein-4B"
QUICK = (HELD, "stable-diffusion-xl-base-1.0")


@pytest.fixture(scope="module")
def program() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / ".ci")
        yield importlib.import_module("models_cards")


def rows() -> dict[str, str]:
    """Return the lines of the tables by the model at their beginning."""
    _, _, tables = DOCUMENT.read_text().partition("<!-- cards")
    return {match[1]: match[0] for match in re.finditer(r"^\| ([\w.-]+)(?:\[\^\w+\])* \| [\d.]+ \|.*$", tables, re.M)}


def test_every_published_model_has_a_row() -> None:
    assert list(rows()) == list(published_models())


@pytest.mark.parametrize("model", QUICK)
def test_a_row_is_what_the_program_estimates(program: ModuleType, model: str) -> None:
    assert rows()[model] == f"| {' | '.join(program.row(model))} |", COMMAND


@pytest.mark.parametrize("model", QUICK[:1])
def test_savings_are_what_the_program_chooses(program: ModuleType, model: str) -> None:
    line = f"| {' | '.join(program.savings_row(model, program.estimated(model)))} |"
    assert line in DOCUMENT.read_text().splitlines(), COMMAND


@pytest.mark.slow
def test_it_is_up_to_date(program: ModuleType) -> None:
    written = DOCUMENT.read_text()
    assert written == program.document(written), COMMAND


def test_what_was_held_is_within_what_the_documents_say(program: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table of held memory is up to date: here for one model; the document's program checks all."""
    _, _, tables = DOCUMENT.read_text().partition("<!-- cards")
    _, _, table = tables.partition("held by estimated")
    held = re.findall(r"^\| ([\w.-]+) \| [^|]+ \| [\d.]+ \| [\d.]+ \| ([\d.]+) \|$", table, re.M)
    one = [row for row in program.swept() if row["model"] == HELD]
    monkeypatch.setattr(program, "swept", lambda: one)
    assert [ratio for name, ratio in held if name == HELD] == [row[-1] for row in program.held()], COMMAND
    assert len(held) > 5
    assert all(1.0 <= float(ratio) <= program.MOST_HELD for _, ratio in held)
    assert f"1.0 to {program.MOST_HELD} times the memory that the command says" in DOCUMENT.read_text()


def test_only_what_was_seen_is_bold(program: ModuleType) -> None:
    bold = {model for model, line in rows().items() if "**" in line}
    swept = {one["model"] for one in program.swept() if one.get("through") == "application"}
    assert bold <= swept


@pytest.fixture
def seen(program: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a file of lines in place of the results on cards."""
    times = {"first_ms": {"total": 9100.0}, "other_ms": {"total": 5200.0}, "predicted_s": 4.04, "same_bytes": True}
    card = {"hardware": "NVIDIA H200", "left_gib": 11.83, "held_gib": 11.06, "size": "1024x1024", "steps": 4}
    one = {"model": HELD, "card_gb": 12.0, "savings": {"denoiser.torch.offloaded_blocks": 10}, "estimated_gib": 9.92}
    ran = one | {"extra_s": 2.31, "ready_s": 71.26} | card | times
    lines = (
        ran,
        one
        | card
        | {"card_gb": 16.0, "error": "RuntimeError: 500", "out_of_memory": "CUDA out of memory", "extra_s": 1},
        one | card | {"card_gb": 24.0, "error": "ReadTimeout: timed out", "extra_s": 1},
        one | {"card_gb": 48.0, "hardware": "NVIDIA H200", "error": "ValueError: no room on the disk"},
        ran | {"card_gb": 80.0, "hardware": "CPU"},
    )
    file = tmp_path / "cards.jsonl"
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    monkeypatch.setattr(program, "SEEN", file)
    return file


def test_cells_are_bold_where_a_card_was_seen(program: ModuleType, seen: Path) -> None:
    estimate = program.estimated(HELD)
    estimated = [program.savings_cell(program.budget_on(estimate, card)) for card in program.SMALL_CARDS]
    row = program.savings_row(HELD, estimate)
    assert row[:4] == (HELD, "**o +2.3 s**", "**out of memory**", "**failed**")
    assert list(row[4:]) == estimated[3:], "unstarted runs and CPUs give no card"


def test_what_was_held_on_cards_has_a_table(program: ModuleType, seen: Path) -> None:
    ran, lacked, failed = program.seen_rows()
    of_card = ("o", "9.9", "11.1", "1024x1024", "4")
    assert ran == (HELD, "12 GB", *of_card, "71.3", "9.1", "5.2", "4.0", "yes")
    assert lacked == (HELD, "16 GB", *of_card, *"––––", "out of memory")
    assert failed == (HELD, "24 GB", *of_card, *"––––", "failed")
    assert len(ran) == len(program.SEEN_COLUMNS.split("|"))
    assert "on NVIDIA H200, with random" in program.seen_table()


def test_nothing_is_said_of_cards_that_were_not_seen(
    program: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program, "SEEN", tmp_path / "none.jsonl")
    assert program.seen_table() == ""
