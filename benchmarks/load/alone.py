"""Lone times: how long a request of each class takes by itself, measured over HTTP or read from an earlier run."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

import httpx
from pydantic import TypeAdapter

from benchmarks.load.client import NO_HEADERS, TIMEOUT_S, answered
from benchmarks.load.mix import RequestClass
from benchmarks.serving.settings import argument_type
from deployments.cli.local import uses_proxies

NUM_LONE = 3

LoneTimes = Mapping[str, float]
"""Seconds by class."""
_TIMES = TypeAdapter(dict[str, float])


def add_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--alone``, whose value is what ``read`` returns."""
    about = "lone times of classes: the output or the --out file of an earlier run"
    parser.add_argument("--alone", type=argument_type(read), default={}, metavar="FILE", help=about)


def read(file: str | Path) -> dict[str, float]:
    """Return the lone times in a run's document, in its part "alone", or in output that ends with the document.

    ValueError for anything else.
    """
    if not Path(file).is_file():
        raise ValueError(f"{file} is no file that a run of benchmarks.load left")
    text = Path(file).read_text().strip()
    try:
        document = json.loads(text)
    except ValueError:
        document = json.loads("".join(text.splitlines()[-1:]))
    return _TIMES.validate_python(document.get("alone", document))


async def measured(
    url: str, classes: Sequence[RequestClass], headers: Mapping[str, str] = NO_HEADERS, num: int = NUM_LONE
) -> dict[str, float]:
    """Return the median of ``num`` requests of each class after a first one. RuntimeError if one is not answered.

    With ``num=0`` only the first requests are sent, so that later ones find all that is made once for a size.
    """
    async with httpx.AsyncClient(
        base_url=url, timeout=TIMEOUT_S, headers=headers, trust_env=uses_proxies(url)
    ) as client:
        times_s = {kind.name: [await _seconds(client, kind, seed) for seed in range(1 + num)] for kind in classes}
    return {name: median(found[1:]) for name, found in times_s.items() if num}


async def _seconds(client: httpx.AsyncClient, kind: RequestClass, seed: int) -> float:
    began_s = asyncio.get_running_loop().time()
    answer = await answered(client, kind, seed)
    if answer.status != httpx.codes.OK:
        raise RuntimeError(f"a request of class {kind.name} alone was answered {answer.status}")
    return asyncio.get_running_loop().time() - began_s
