"""Every fault once, with clients beside it: the answer to each, and after how many seconds.

    python -m benchmarks.faults.matrix [--seconds 600] [--config laptop] [--set KEY=VALUE] [--folder FOLDER]
                                       [--model FLUX.1-dev] [--steps 20] [--only WORD ...] [--out FILE]

Stops (SIGSTOP) or kills (SIGKILL) one process of each kind, the most important first, until ``--seconds`` are over; the
start and the end of the application come on top. Three clients ask for a picture: one is at its third step of
``--steps`` when the fault strikes, one asks at once for one of four steps, one five seconds later. A client whose
request fails asks again at once. Seconds count from the fault and include the picture itself. Where a gang is lost
under a picture, lines below its row say where the seconds go: the parts one after the other, then the ranks' phases.

Prints one table. ``--out`` is written after each row. Ends with 1 if a picture has other bytes than without a fault, a
client has none after a minute, or the application does not recover. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.faults.insistent import Answer, Health, InsistentClient
from benchmarks.faults.kills import Fault, faults, processes_of, send
from benchmarks.faults.timeline import inside, records_of, spans
from benchmarks.results import in_gib
from benchmarks.serving.application import Application, serving, wait_until
from benchmarks.serving.settings import add_options, config_of
from deployments.config import ServeConfig

STRIKE_AT_STEP, FEW_STEPS = 3, 4
LATER_S = 5.0
UNDER_WAY, AT_ONCE, LATER = "under way", "asked at once", f"asked {LATER_S:g} s later"
GIVE_UP_S = 60.0
"""A client without a picture for so long after the fault hangs."""
LOOK_EVERY_S = 0.1
SETTLED_S, SETTLED_WITHIN_S = 3.0, 90.0
"""The next fault strikes when the application is whole for so long."""
HEAD = "| fault | process gone (s) | `/health` not 200 (s) | moment | answer | picture there (s) |"

References = Mapping[int, bytes]
"""Pictures without a fault by their number of steps."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--seconds", type=float, default=600.0, help="no fault begins later")
    parser.add_argument("--steps", type=int, default=20, help="of the picture that is under way")
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="WORD", help="faults with one of these in their name"
    )
    parser.add_argument("--out", type=Path, help="where the document is kept, as far as it is")
    arguments = parser.parse_args()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}", flush=True)
    config = config_of(arguments).with_metrics(None)
    with serving(config) as application:
        document = run(application, config, arguments)
        ends_s = time.monotonic()
    document["end_s"] = round(time.monotonic() - ends_s, 1)
    print(f"\nSIGTERM ended the application in {document['end_s']} s", *table(document), sep="\n")
    print(json.dumps(document))
    sys.exit(0 if document["rows"] and all(row["is_well"] for row in document["rows"]) else 1)


def run(application: Application, config: ServeConfig, arguments: argparse.Namespace) -> dict[str, Any]:
    model, began_s = config.app.models[0].name, time.monotonic()
    client = InsistentClient(url=application.url, model=model)
    references, lone_s = draw_references(client, arguments.steps)
    counts = {kind: len(found) for kind, found in processes_of(application.process).items()}
    rows: list[dict[str, Any]] = []
    left_out: list[str] = []
    document = {"model": model, "cores": os.cpu_count(), "lone_s": lone_s, "rows": rows, "left_out": left_out}
    for fault in faults(application, model):
        if not any(word in fault.name for word in arguments.only):
            continue
        if time.monotonic() - began_s > arguments.seconds:
            left_out.append(fault.name)
        else:
            rows.append(row(application, client, fault, references, counts))
            rows[-1]["pss_gib"] = in_gib(application.memory().pss_bytes)
            parts = (f"  {what:<60} {took_s:7.2f} s" for what, took_s in rows[-1]["parts_s"].items())
            print(f"{time.strftime('%H:%M:%S')}", *lines_of(rows[-1]), *parts, sep="\n", flush=True)
        if arguments.out:
            arguments.out.write_text(json.dumps(document))
    return document


def draw_references(client: InsistentClient, num_steps: int) -> tuple[References, float]:
    """Return the pictures, and the seconds that the longest one takes. RuntimeError if there is none."""
    references, lone_s = {}, 0.0
    for steps in (FEW_STEPS, FEW_STEPS, num_steps, num_steps):  # the first of its kind may compile
        asked_s = time.monotonic()
        references[steps] = client.picture(steps, asked_s + 10 * GIVE_UP_S).data
        lone_s = time.monotonic() - asked_s
    if not all(references.values()):
        raise RuntimeError("no picture before any fault")
    return references, round(lone_s, 2)


def row(
    application: Application, client: InsistentClient, fault: Fault, references: References, counts: Mapping[str, int]
) -> dict[str, Any]:
    """Strike once, wait for all answers and until the application is whole again."""
    strike, health, is_under_way = fault.aim(), Health(url=application.url), threading.Event()
    num_steps, steps = max(references), list[tuple[int, float]]()

    def at_step(step: int) -> None:
        steps.append((step, time.time()))
        if step >= STRIKE_AT_STEP:
            is_under_way.set()

    def ask_later() -> Answer:
        time.sleep(LATER_S)
        return client.picture(FEW_STEPS, give_up_s)

    with health.watched(), ThreadPoolExecutor() as pool:
        under_way = pool.submit(client.picture, num_steps, time.monotonic() + 2 * GIVE_UP_S, at_step)
        is_under_way.wait(GIVE_UP_S)
        victims = strike()
        struck_s, struck_unix_s = time.monotonic(), time.time()
        give_up_s = struck_s + GIVE_UP_S
        asked = {UNDER_WAY: under_way, AT_ONCE: pool.submit(client.picture, FEW_STEPS, give_up_s)}
        asked[LATER] = pool.submit(ask_later)
        gone_s = _gone_s(victims, give_up_s)
        answers = {moment: answer.result() for moment, answer in asked.items()}
        _ = [send(victim, signal.SIGCONT) for victim in victims]
        is_whole = settled(application, health, counts)
    texts = {
        moment: answer.text(references[num_steps if moment == UNDER_WAY else FEW_STEPS])
        for moment, answer in answers.items()
    }
    return {
        "fault": fault.name,
        "gone_s": None if gone_s is None else round(gone_s - struck_s, 1),
        "outages_s": [[round(from_s, 1), round(until_s, 1)] for from_s, until_s in health.outages(struck_s)],
        "answers": {
            moment: {
                "answer": texts[moment],
                "s": None if answer.ended_s is None else round(answer.ended_s - struck_s, 1),
                "said": answer.said,
            }
            for moment, answer in answers.items()
        },
        "is_well": is_whole and bool(victims) and all(text.endswith("right") for text in texts.values()),
        "parts_s": parts_of(application, client.model, struck_unix_s, steps),
        "load": round(os.getloadavg()[0], 1),
    }


def parts_of(
    application: Application, model: str, fault_s: float, steps: Sequence[tuple[int, float]]
) -> dict[str, float]:
    """Return the seconds of each part of a recovery, then of ranks' phases; empty where no gang was lost.

    ``steps`` are those of the picture that was under way, with their Unix times.
    """
    first_s = next((at_s for step, at_s in steps if at_s > fault_s and step <= STRIKE_AT_STEP), None)
    if first_s is None:
        return {}
    records, end_s = records_of(application.logs), steps[-1][1]
    with suppress(ValueError):
        parts = {part.what: part.took_s for part in spans(records, model, fault_s, first_s, end_s)}
        return {what: round(took_s, 2) for what, took_s in (parts | inside(records, fault_s, end_s)).items()}
    return {}


def _gone_s(victims: Sequence[psutil.Process], until_s: float) -> float | None:
    """Return when the last of the victims had ended; None if one has not by ``until_s``."""
    is_over = wait_until(lambda: not any(map(_runs, victims)), until_s - time.monotonic(), LOOK_EVERY_S)
    return time.monotonic() if is_over else None


def _runs(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def settled(application: Application, health: Health, counts: Mapping[str, int]) -> bool:
    """Wait until health was 200 and no process was missing for ``SETTLED_S``; return False if this takes too long."""
    end_s, whole_since_s = time.monotonic() + SETTLED_WITHIN_S, time.monotonic()
    while (now_s := time.monotonic()) < end_s:
        found = processes_of(application.process)
        is_whole = all(len(found[kind]) >= count for kind, count in counts.items())
        if not is_whole or not health.looks or health.looks[-1][1] != httpx.codes.OK:
            whole_since_s = now_s
        elif now_s - whole_since_s > SETTLED_S:
            return True
        time.sleep(LOOK_EVERY_S)
    return False


def table(document: dict[str, Any]) -> Iterator[str]:
    """Yield one Markdown table of all rows, and the faults that were left out for lack of time."""
    yield f"{document['model']}: {document['lone_s']} s alone\n"
    yield HEAD
    yield "|---|---|---|---|---|---|"
    for one in document["rows"]:
        yield from lines_of(one)
    if document["left_out"]:
        yield f"\nno time for: {', '.join(document['left_out'])}"


def lines_of(one: dict[str, Any]) -> Iterator[str]:
    gone = "never" if one["gone_s"] is None else one["gone_s"]
    outages = ", ".join(f"{from_s} to {until_s}" for from_s, until_s in one["outages_s"])
    for moment, answer in one["answers"].items():
        seconds = "never" if answer["s"] is None else answer["s"]
        yield f"| {one['fault']} | {gone} | {outages} | {moment} | {answer['answer']} | {seconds} |"


if __name__ == "__main__":
    main()
