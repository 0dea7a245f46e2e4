"""Results of a benchmark: told as they come, and as one document at the end."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def status_of(results: Iterable[Mapping[str, Any]]) -> int:
    """Returns what a program ends with: 1 if each of ``results`` is an "error", or there are none, else 0."""
    return 0 if any("error" not in result for result in results) else 1


def tell(document: dict[str, Any], results: Iterable[Any], out: Path | None) -> None:
    """Prints each of ``results`` on a line, then the document with all of them under "results"; ``out`` has it all the
    time."""
    document["results"] = []
    for result in results:
        print(json.dumps(result), flush=True)
        document["results"].append(result)
        if out is not None:
            out.write_text(json.dumps(document))
    print(json.dumps(document), flush=True)
