"""Write the tables of docs/operate/cards.md: the GPUs that a published model takes, and savings on one GPU.

PYTHONPATH=. python .ci/models_cards.py

Lines of ``python -m benchmarks.sweep.cards`` say what was seen of savings.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

from models_facts import REPORTS, grid, of_gpus, replaced, swept

from benchmarks.sweep.card_sizes import CARDS, Card
from benchmarks.sweep.result_file import ERROR, Result, ResultFile
from deployments.sizing.estimate import Estimate, EstimateOptions, WeightsAlone, make_estimate
from deployments.sizing.fit import GIB, Change, Fit, RequestTimes, with_memory
from deployments.sizing.savings import Budget, BudgetRules, choose_savings
from engines.planner.cost_model import USABLE
from engines.planner.forecast import forecast
from engines.planner.machine import MACHINES
from pipelines.libraries import quiet_libraries
from pipelines.loading import published_models

DOCUMENT = Path(__file__).parents[1] / "docs" / "operate" / "cards.md"
MOST_HELD = 1.5
"""GPUs held up to this many times the estimate (docs/scale/strategies.md)."""
LETTERS = {"denoiser.strategy": "w", "denoiser.precision": "q", "decoder.memory_gib": "d", "text_encoder and": "e"}
LETTERS["text_encoder.num_gpus"] = "c"
TIGHT = "~"
SEEN = REPORTS / "cards.jsonl"
SEEN_COLUMNS = "model|card|savings|estimated, GiB|held at most, GiB|size|steps|ready, s|first, s|other prompt, s"
SEEN_COLUMNS += "|predicted, s|same bytes"
SAVING_LETTERS = {
    "decoder.memory_gib": "d",
    "text_encoder.takes_turns": "t",
    "text_encoder.offloads_layers": "l",
    "denoiser.torch.offloaded_blocks": "o",
    "text_encoder.num_gpus": "c",
    "denoiser.precision": "q",
}
SMALL_CARDS = CARDS[:5]


@cache
def estimated(model: str) -> Estimate | WeightsAlone:
    with quiet_libraries():
        return make_estimate(EstimateOptions(model=model, num_ranks=1, machine="h200"))


def row(model: str) -> tuple[str, ...]:
    estimate = estimated(model)
    if isinstance(estimate, WeightsAlone):
        need, unknown = estimate.total_bytes, estimate.parts.unknown
        marks = "[^weights]" + ("[^encoder]" if unknown else "")
    else:
        need, marks = estimate.fit.total_bytes, "[^encoder]" if estimate.fit.unknown else ""
    return f"{model}{marks}", f"{need / GIB:.1f}", *(cell(model, card) for card in CARDS)


def cell(model: str, card: Card) -> str:
    """Return the fewest GPUs on which all parts fit, with a letter for each change; bold if a run confirmed it."""
    estimate = estimated(model)
    if isinstance(estimate, WeightsAlone):
        fits = estimate.total_bytes <= USABLE * card.gib * GIB
        found = Change(words=(), num_gpus=1, num_bytes=estimate.total_bytes) if fits else None
    else:
        found = smallest(estimate, card)
    if found is None:
        return "–"
    if card.hardware and found.num_gpus in seen_on(model, card.hardware):
        return f"**{in_short(found)}**"
    return in_short(found) + (TIGHT if found.num_bytes * MOST_HELD > card.gib * GIB else "")


def fit_on(estimate: Estimate, card: Card) -> Fit:
    machine = with_memory(MACHINES[card.machine].for_ranks(1), card.gib)
    own = estimate.forecast
    step = forecast(own.counted, own.work, 1, machine, own.precision, must_fit=False)
    return replace(estimate.fit, step=step)


def smallest(estimate: Estimate, card: Card) -> Change | None:
    fit = fit_on(estimate, card)
    if fit.fits:
        return Change(words=(), num_gpus=1, num_bytes=fit.total_bytes)
    return next(iter(fit.changes()), None)


def in_short(change: Change) -> str:
    letters = (letter for start, letter in LETTERS.items() for word in change.words if word.startswith(start))
    return " ".join((str(change.num_gpus), *letters))


def savings_rows() -> Iterator[tuple[str, ...]]:
    """Yield rows of what ``memory_gib`` chooses on one GPU, for models whose steps are known before a request."""
    for model in published_models():
        if isinstance(estimate := estimated(model), Estimate):
            yield savings_row(model, estimate)


def savings_row(model: str, estimate: Estimate) -> tuple[str, ...]:
    marks, seen = "[^encoder]" if estimate.fit.unknown else "", seen_on_cards()
    cells = (
        f"**{failure(one) or said_savings(one['savings'], one['extra_s'])}**"
        if (one := seen.get((model, card.gb)))
        else savings_cell(budget_on(estimate, card))
        for card in SMALL_CARDS
    )
    return f"{model}{marks}", *cells


def seen_on_cards() -> dict[tuple[str, float], Result]:
    """Return the newest result on a GPU by model and card. Models without room on the disk were not run."""
    results = (one for one in of_gpus(ResultFile(SEEN).results()) if "left_gib" in one)
    return {(one["model"], one["card_gb"]): one for one in results}


def failure(one: Result) -> str:
    """Return why the model did not run; "" if it did."""
    return "" if ERROR not in one else "out of memory" if "out_of_memory" in one else "failed"


def seen_rows() -> Iterator[tuple[str, ...]]:
    """Yield a row of memory and times for each result on a card, in the order of models and cards."""
    order = {name: number for number, name in enumerate(published_models())}
    for (model, gb), one in sorted(seen_on_cards().items(), key=lambda pair: (order[pair[0][0]], pair[0][1])):
        letters = " ".join(SAVING_LETTERS[key] for key in one["savings"]) or "none"
        row = (model, f"{gb:g} GB", letters, f"{one['estimated_gib']:.1f}", f"{one['held_gib']:.1f}")
        row += (one["size"], str(one["steps"]))
        if ERROR in one:
            yield *row, *("–",) * 4, failure(one)
        else:
            times = (one["ready_s"], one["first_ms"]["total"] / 1e3, one["other_ms"]["total"] / 1e3, one["predicted_s"])
            yield *row, *(f"{time_s:.1f}" for time_s in times), "yes" if one["same_bytes"] else "no"


def budget_on(estimate: Estimate, card: Card) -> Budget | None:
    """Return what ``memory_gib`` chooses on one such card if it may quantise; None if nothing fits."""
    fit = fit_on(estimate, card)
    step_ms, num_steps = fit.step.chosen.total_ms, estimate.times.num_steps
    times = RequestTimes.of(estimate.parts, fit.machine, estimate.request, [num_steps], [step_ms])
    rules = BudgetRules(precisions=("native", *fit.machine.quantised))
    try:
        return choose_savings(fit, times, card.gb, rules)
    except ValueError:
        return None


def savings_cell(budget: Budget | None) -> str:
    if budget is None:
        return "–"
    return said_savings([saving.key for saving in budget.savings], budget.extra_s)


def said_savings(keys: Collection[str], extra_s: float) -> str:
    return f"{' '.join(SAVING_LETTERS[key] for key in keys)} {extra_s:+.1f} s" if keys else "all fits"


def seen_on(model: str, hardware: str) -> set[int]:
    """Return the numbers of GPUs on which a sweep made pictures or clips of ``model`` by the whole application."""
    results = (one for one in swept() if one["model"] == model and hardware in one["hardware"])
    return {one["ranks"] for one in results if one.get("through") == "application" and "error" not in one}


def held() -> Iterator[tuple[str, ...]]:
    """Yield rows of the most memory that pictures took on a GPU in a sweep, beside the estimate for that machine.

    Clips are left out: a sweep's are shorter than the estimate's. So are models that run on one rank only: their
    estimate has weights alone. Memory that the sweep's own process held before does not count.
    """
    for one in swept():
        is_picture = one.get("through") == "application" and one["size"].count("x") == 1
        if not is_picture or one["ranks"] > 1:
            continue
        if isinstance(estimate := estimated(one["model"]), Estimate):
            gib, seen = estimate.fit.total_bytes / GIB, one["gpu_gib"]
            most = seen["highest"] - seen.get("before", 0.0)
            yield one["model"], one["hardware"], f"{gib:.1f}", f"{most:.1f}", f"{most / gib:.2f}"


def seen_table() -> str:
    """Return the table of results on cards, with its caption; empty without results."""
    rows, hardware = list(seen_rows()), sorted({one["hardware"] for one in seen_on_cards().values()})
    if not rows:
        return ""
    caption = (
        f"*Bold cells and this table: seen by `python -m benchmarks.sweep.cards` on {', '.join(hardware)}, with random "
        "weights.\nAnother process held the memory that such a card lacks. Costs and times are those of this GPU, not "
        "of\nthe card. The prediction is for a prompt that the encoder has not seen.\n"
        "Results: `benchmarks/reports/cards.jsonl`.*"
    )
    return f"\n{grid(SEEN_COLUMNS.split('|'), rows)}\n{caption}\n"


def document(written: str) -> str:
    """Return ``written`` with its tables made anew."""
    fits = grid(("model", "GiB estimated", *(f"{card.gb} GB" for card in CARDS)), map(row, published_models()))
    columns = ("model", "GPU", "estimated, GiB", "held at most, GiB", "held by estimated")
    savings = grid(("model", *(f"{card.gb} GB" for card in SMALL_CARDS)), savings_rows())
    written = replaced(written, "savings", savings + seen_table())
    return replaced(written, "cards", f"{fits}\n{grid(columns, held())}")


if __name__ == "__main__":
    DOCUMENT.write_text(document(DOCUMENT.read_text()))
