"""Results of a sweep: a file with a line of JSON for each model and number of ranks, which is its state as well."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ERROR = "error"
DECODE_ERROR = "decode_error"
"""Key of the reason why latents were not decoded, beside the steps' times."""

Result = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Kept:
    """The results in ``path``, which need not be there yet."""

    path: Path

    def results(self) -> Iterator[Result]:
        """Yields them in their order, without a line that a program was killed in."""
        for line in self.path.read_text().splitlines() if self.path.exists() else ():
            if line.endswith("}"):
                yield json.loads(line)

    def has(self, model: str, ranks: int, *, failed: bool) -> bool:
        """Whether there is a result of ``model`` on so many ranks; one that ``failed`` counts if it is to."""
        found = (one for one in self.results() if (one["model"], one["ranks"]) == (model, ranks))
        return any(failed or ERROR not in one for one in found)

    def add(self, result: Result) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a+") as file:
            file.seek(max(0, file.tell() - 1))
            file.write(("\n" if file.read(1) not in ("", "\n") else "") + json.dumps(result) + "\n")
