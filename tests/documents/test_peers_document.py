"""Tables of peers are the output of their program; a ratio is to a peer's best setting on equal GPUs."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from benchmarks.model_step import MAKERS, OURS
from tests.support.fenced import ROOT

HOST = {"hardware": "2 x NVIDIA H200", "torch": "2.11.0+cu130"}
MODEL = {"model": "Qwen-Image", "size": "1024x1024x1", "branches": 2, "ranks": 2, "precision": "native"}
PUBLISHED = {
    "project": "SGLang",
    "setting": "tensor parallel",
    "model": "FLUX.1-dev",
    "size": "1024x1024",
    "precision": "bf16",
    "ranks": 2,
    "card": "H200",
    "step_ms": 70.0,
    "source": "a page",
}


@pytest.fixture(scope="module")
def program() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / ".ci")
        yield importlib.import_module("peers_document")


def step(maker: str, median_ms: float, *options: str, **facts: Any) -> dict[str, Any]:
    case = "/".join((maker, "1024", "w2", "bf16", "ulysses", *options))
    return {"case": case, "median_ms": median_ms, **HOST, **facts}


OURS_MS = step("fast", 60.0, "peer")
EAGER, OWN = step("sglang", 90.0, "uncaptured"), step("sglang-graphs", 80.0, "uncaptured")
WHOLE, COMPILED = step("sglang", 75.0), step("diffusers-ulysses", 84.0, "uncaptured")


def compared(program: ModuleType, folder: Path, *lines: dict[str, Any], date: str = "2026-11-27") -> Any:
    path = folder / f"peers_host_{date}.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "published_steps.jsonl").touch()
    return program.comparisons(folder)


def test_documents_are_up_to_date(program: ModuleType) -> None:
    found = program.comparisons(program.REPORTS)
    written, readme = program.DOCUMENT.read_text(), program.README.read_text()
    made = program.starts(program.performance(written, found), program.REPORTS)
    assert (written, readme) == (made, program.readme(readme, found)), "run PYTHONPATH=. python .ci/peers_document.py"
    assert len(found) >= 4


def test_a_start_on_the_whole_gpu_precedes_those_on_smaller_cards(program: ModuleType, tmp_path: Path) -> None:
    again = {"first_ms": {"total": 1.0}, "again_ms": {"total": 1.0}, "phases_s": {"encoder: weights": 1.0}}
    cards = [{"model": model, "card_gb": card_gb, "ready_s": card_gb} for model in "ab" for card_gb in (24.0, 16.0)]
    whole = [{"model": "a", "ranks": ranks, "ready_s": 9.0, "hardware": "NVIDIA H100"} for ranks in (1, 2)]
    for name, lines in (("cards", cards), ("sweep", whole)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line | again) + "\n" for line in lines))
    table = program.starts("<!-- starts: x -->\n<!-- end of starts -->\n", tmp_path)
    rows = [[cell.strip() for cell in row.split("|")[1:4]] for row in table.splitlines()[3:-1]]
    assert rows == [["a", "1 × H100", "9.0"], ["a", "2 × H100", "9.0"], ["b", "24 GB", "24.0"]]


def test_a_ratio_is_to_the_best_setting_of_the_best_peer(program: ModuleType, tmp_path: Path) -> None:
    """Errors are no figures."""
    failed = {"case": "sglang-blocks/1024/w2/bf16/ulysses", "error": "not captured", **HOST}
    (one,) = compared(program, tmp_path, OURS_MS, EAGER, failed, OWN, WHOLE, COMPILED)
    assert (one.best.name, one.ratio) == ("SGLang, captured whole", "1.25")
    assert one.best_of("SGLang").median_ms == 75
    assert one.best_of("diffusers").name == "diffusers, Ulysses, blocks compiled"
    (one,) = compared(program, tmp_path, OURS_MS, EAGER, OWN)
    assert (one.best.name, one.ratio) == ("SGLang, own CUDA graphs", "1.33")


def test_a_better_published_figure_counts_where_the_card_is_the_same(program: ModuleType, tmp_path: Path) -> None:
    for card, expected in (("H200", "1.17"), ("H100", "1.25")):
        (tmp_path / "published_steps.jsonl").write_text(json.dumps({**PUBLISHED, "card": card}))
        (one,) = compared(program, tmp_path, OURS_MS, WHOLE)
        assert one.ratio == expected
        assert program.row(one, ["SGLang"])[3:5] == ("75.0", "70.0" if card == "H200" else "")


def test_a_peer_that_is_ahead_is_bold(program: ModuleType, tmp_path: Path) -> None:
    (one,) = compared(program, tmp_path, OURS_MS, step("sglang", 59.0))
    assert one.ratio == "**0.98**"


def test_hosts_are_not_mixed_and_the_last_one_counts(program: ModuleType, tmp_path: Path) -> None:
    compared(program, tmp_path, OURS_MS, step("sglang", 61.0), date="2026-11-26")
    (one,) = compared(program, tmp_path, OURS_MS, EAGER)
    assert one.ratio == "1.50"
    other = {**EAGER, "hardware": "2 x NVIDIA H100 80GB HBM3"}
    (one,) = compared(program, tmp_path, OURS_MS, other)
    assert one.ratio == "1.02"  # the day before: nothing of Troupe on those GPUs


def test_models_have_rows_too(program: ModuleType, tmp_path: Path) -> None:
    """The fastest strategy that a gang would choose counts as Troupe's."""
    lines = [
        {**MODEL, **HOST, "maker": maker, "median_ms": median_ms}
        for maker, median_ms in (
            ("ours, guidance", 130.0),
            ("ours, ulysses", 140.0),
            ("ours, in parts, ulysses", 135.0),
            ("ours, fp8 attention, ulysses", 98.0),
            ("ours compiled, ulysses", 99.0),
            ("diffusers compiled-captured", 156.0),
        )
    ]
    (one,) = compared(program, tmp_path, *lines)
    cells = program.row(one, ["diffusers"])
    assert cells[:4] == ("Qwen-Image, 1024 × 1024, bf16, 2 branches", "2 × H200", "130.0", "156.0")
    assert cells[-2:] == ("diffusers, blocks compiled, captured whole", "1.20")


def test_every_maker_that_can_be_timed_has_a_name(program: ModuleType) -> None:
    peers = {maker.removesuffix("-captured") for maker in MAKERS} - {*OURS}
    renamed = {"eager": "diffusers eager", "diffusers": "diffusers compiled"}
    renamed["diffusers-undivided"] = "diffusers compiled, undivided"
    assert {renamed.get(maker, maker) for maker in peers} <= program.MAKERS.keys()


def test_a_published_figure_names_its_source(program: ModuleType) -> None:
    lines = list(program.lines_of(program.REPORTS / "published_steps.jsonl"))
    assert lines
    assert all(line["source"] for line in lines)


def test_a_readme_without_a_place_stays_and_one_with_it_has_the_row(program: ModuleType, tmp_path: Path) -> None:
    found = compared(program, tmp_path, OURS_MS, WHOLE)
    assert program.readme("no table", found) == "no table"
    written = program.readme("a\n<!-- peers: x -->\nold\n<!-- end of peers -->\nb", found)
    assert "| one step | card | 2 GPUs |\n" in written
    assert "| FLUX.1-dev, 1024 × 1024, bf16 | H200 | 1.25 |" in written
    assert "old" not in written
