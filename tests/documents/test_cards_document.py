"""The tables of docs/operate/cards.md are what their program writes."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
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
    """Lines of the tables by the model at their beginning."""
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
    """By the table of what was held, which is up to date: here for one model, for all where the document is made."""
    _, _, tables = DOCUMENT.read_text().partition("<!-- cards")
    _, _, table = tables.partition("held by estimated")
    held = re.findall(r"^\| ([\w.-]+) \| [^|]+ \| [\d.]+ \| [\d.]+ \| ([\d.]+) \|$", table, re.M)
    one = [row for row in program.swept() if row["model"] == HELD]
    monkeypatch.setattr(program, "swept", lambda: one)
    assert [ratio for name, ratio in held if name == HELD] == [row[-1] for row in program.held()], COMMAND
    assert len(held) > 5
    assert all(1.0 <= float(ratio) <= program.MOST_HELD for _, ratio in held)
    said = f"1.0 to {program.MOST_HELD} times the memory that the command says"
    for name in ("docs/operate/cards.md", "docs/scale/strategies.md"):
        assert said in (ROOT / name).read_text(), name


def test_only_what_was_seen_is_bold(program: ModuleType) -> None:
    bold = {model for model, line in rows().items() if "**" in line}
    swept = {one["model"] for one in program.swept() if one.get("through") == "application"}
    assert bold <= swept
