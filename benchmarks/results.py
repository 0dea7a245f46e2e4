"""Results of a benchmark, printed as they come and as one document at the end."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def status_of(results: Iterable[Mapping[str, Any]]) -> int:
    """Return the exit status: 0 if one of ``results`` has no "error", else 1."""
    return 0 if any("error" not in result for result in results) else 1


def tell(document: dict[str, Any], results: Iterable[Any], out: Path | None) -> None:
    """Print each of ``results``, then the document with all of them. ``out`` is written after each."""
    document["results"] = []
    for result in results:
        print(json.dumps(result), flush=True)
        document["results"].append(result)
        if out is not None:
            out.write_text(json.dumps(document))
    print(json.dumps(document), flush=True)
