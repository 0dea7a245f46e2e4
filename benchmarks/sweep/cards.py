"""Models on small cards: what ``troupe serve MODEL --memory N`` holds and takes, with one GPU's memory capped.

    python -m benchmarks.sweep.cards MODEL ... --memory 12 16 24 [--allow-quantization] [--out FILE] [--limit-s 500]
        [--card-limit-s 300] [--steps 4] [--size 1024x1024] [--frames 33] [--scratch FOLDER] [--keep] [--twins]
        [--logs FOLDER]

A model is written once with random weights (a folder is taken as it is), then served for each size of card by the
savings that ``--memory`` chooses. Another process holds the rest of the GPU's memory
(``benchmarks.sweep.occupant``): a card of 24 GB leaves what CUDA reports there (``card_sizes``). The application is
asked for a picture or clip, for the same again, and for one with another prompt, whose seconds are predicted.

Each model and card is one line of JSON in ``--out``: savings, estimate and times, or the "error" that says why there
are none, with ``out_of_memory`` if a process had no memory left. A start and its requests may take
``--card-limit-s`` together. It goes on where it stopped (with ``--again``, also with lines that have an error), begins
nothing after ``--limit-s``, and ends with 1 if it measured nothing. ``--keep`` leaves written models in ``--scratch``
for the next call. ``--twins`` writes transformers with one configuration once, such as both of Wan 2.2. ``--logs``
keeps the logs of every application, also of one that fails at its start, in a folder for each model and card.

On a CPU nothing is held, and only models that need no GPU can be served.
"""

from __future__ import annotations

import argparse
import shutil
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import httpx

from benchmarks.application.client import PROMPT, Client, data_of, timing
from benchmarks.faults.timeline import records_of
from benchmarks.serving.application import Application, serving
from benchmarks.serving.settings import write_model
from benchmarks.sweep.card_sizes import card_bytes
from benchmarks.sweep.loop import Case, SweepRequest, add_run_options, check_room, run_all
from benchmarks.sweep.occupant import occupied
from benchmarks.sweep.result_file import Result
from benchmarks.sweep.whole import made, phases_of
from deployments.cli.configuration import config_for
from deployments.cli.serving import parse_config
from deployments.config import ServeConfig
from deployments.model_config import ModelConfig
from deployments.sizing.memory_budget import budget_of, predicted_s
from pipelines.checkpoint import Checkpoint
from pipelines.defaults import Defaults

OUT = Path("benchmarks/reports/cards.jsonl")
FEW_STEPS = 4
OTHER_PROMPT = "a green triangle between two yellow circles"
CARD_LIMIT_S = 300.0


def main(words: Sequence[str] | None = None) -> None:
    arguments = parse(words)
    run_all(cases(arguments), arguments)


def cases(arguments: argparse.Namespace) -> Generator[Case]:
    """Yield each model on every card. It is written for the first one that is measured."""
    for name in arguments.models:
        with ExitStack() as stack:
            folder = cache(partial(enter_written, stack, name, arguments))
            for gb in arguments.memory:
                keys = {"model": name, "card_gb": gb}
                yield keys, partial(measure, name=name, gb=gb, folder=folder, arguments=arguments)


def measure(result: Result, name: str, gb: float, folder: Callable[[], Path], arguments: argparse.Namespace) -> None:
    """Add each measurement to ``result`` at once: an error leaves the earlier ones.

    ValueError if the model does not fit the card, or the disk.
    """
    model = model_of(config_of(name, gb, arguments))
    budget = budget_of(model)
    result |= {"savings": {saving.key: saving.value for saving in budget.savings}, **about(budget.document())}
    defaults, settings = Checkpoint.of_configuration(name).defaults, SweepRequest.of(arguments)
    size, steps = settings.size_of(defaults), settings.steps_of(defaults)
    predicted = predicted_s(model, budget, size, steps)
    result |= {"size": str(size), "steps": steps, "predicted_s": round(predicted, 2)}
    config, end_s = config_of(str(folder()), gb, arguments), time.monotonic() + arguments.card_limit_s
    held: dict[str, float] = {}
    try:
        with (
            occupied(card_bytes(gb)) as held,
            serving(
                config, ready_within_s=arguments.card_limit_s, keep_logs_in=log_folder(name, gb, arguments)
            ) as application,
        ):
            result["ready_s"] = round(application.ready_s, 1)
            result["phases_s"] = phases_of(records_of(application.logs))
            ask(result, application, defaults, settings, end_s)
    finally:
        result |= held


def log_folder(name: str, gb: float, arguments: argparse.Namespace) -> Path | None:
    return None if arguments.logs is None else arguments.logs / f"{Path(name).name}_{gb:g}"


def about(document: dict[str, Any]) -> dict[str, Any]:
    """Return a budget's predictions, without its settings."""
    return {key: document[key] for key in ("estimated_gib", "host_gib", "extra_s", "is_lossy", "figures")}


def ask(result: Result, application: Application, defaults: Defaults, settings: SweepRequest, end_s: float) -> None:
    """Ask for three pictures or clips until ``end_s`` (of the monotonic clock)."""
    size, steps = settings.size_of(defaults), settings.steps_of(defaults)
    answers: list[httpx.Response] = []
    with Client(application.url) as client:
        for key, prompt in (("first_ms", PROMPT), ("again_ms", PROMPT), ("other_ms", OTHER_PROMPT)):
            client.timeout = httpx.Timeout(max(1.0, end_s - time.monotonic()))
            answers.append(made(client, defaults, steps, size, defaults.min_pictures, prompt))
            result[key] = timing(answers[-1])
    result["step_ms"] = round(min(result[key]["denoise"] for key in ("again_ms", "other_ms")) / steps, 1)
    result["same_bytes"] = data_of(answers[0]) == data_of(answers[1])


def config_of(name: str, gb: float, arguments: argparse.Namespace) -> ServeConfig:
    """Return what ``troupe serve NAME --ranks 1 --memory GB`` serves, without a port for metrics, which others take."""
    config = config_for(name, 1, gb, allow_quantization=arguments.allow_quantization)
    document = config.model_dump(mode="json")
    document["applications"][0]["args"]["metrics"]["port"] = None
    return parse_config(document)


def model_of(config: ServeConfig) -> ModelConfig:
    (model,) = config.app.models
    return model


def enter_written(stack: ExitStack, name: str, arguments: argparse.Namespace) -> Path:
    return stack.enter_context(written(name, arguments))


@contextmanager
def written(name: str, arguments: argparse.Namespace) -> Iterator[Path]:
    """Yield the folder of the model ``name``: itself if it is one, else one in ``--scratch``, written if need be."""
    folder: Path = Path(name) if Path(name).is_dir() else arguments.scratch / f"troupe_card_{name}"
    if folder.is_dir():
        yield folder
        return
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    check_room(name, arguments.scratch, twins=arguments.twins)
    try:
        write_model(name, unfinished, twins=arguments.twins)
        unfinished.rename(folder)
        yield folder
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
        if not arguments.keep:
            shutil.rmtree(folder, ignore_errors=True)


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", help="published, or folders")
    parser.add_argument("--memory", nargs="+", type=float, required=True, metavar="GB", help="sizes of cards")
    parser.add_argument("--allow-quantization", action="store_true", help="where no lossless savings suffice")
    add_run_options(parser, OUT, "card")
    parser.add_argument("--card-limit-s", type=float, default=CARD_LIMIT_S, help="of the start and requests of a card")
    parser.add_argument("--keep", action="store_true", help="written models, for the next call")
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="keeps the logs of each application")
    parser.set_defaults(steps=FEW_STEPS)
    return parser.parse_args(words)


if __name__ == "__main__":
    main()
