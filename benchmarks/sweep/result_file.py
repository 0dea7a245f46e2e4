"""Results of a sweep: a file with a line of JSON for each model and number of ranks (or size of a card), its state."""

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
class ResultFile:
    """The results in ``path``, which need not be there yet."""

    path: Path

    def results(self) -> Iterator[Result]:
        """Yield the results in their order, without a line that a killed program left incomplete."""
        for line in self.path.read_text().splitlines() if self.path.exists() else ():
            if line.endswith("}"):
                yield json.loads(line)

    def has(self, *, failed: bool, **keys: Any) -> bool:
        """Return whether there is a result with these values of ``keys``; one that failed counts if ``failed``."""
        found = (one for one in self.results() if all(one[key] == value for key, value in keys.items()))
        return any(failed or ERROR not in one for one in found)

    def add(self, result: Result) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a+") as file:
            file.seek(max(0, file.tell() - 1))
            file.write(("\n" if file.read(1) not in ("", "\n") else "") + json.dumps(result) + "\n")
