"""Algorithms that were measured to be faster than cuBLASLt's own choice, a file per GPU."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from importlib.resources import files
from typing import Any

from engines.torch_engine.cublaslt.algorithm import Algorithm
from engines.torch_engine.cublaslt.problem import Problem


@dataclass(frozen=True, kw_only=True, slots=True)
class Recorded:
    """``us``: the algorithm's time, ``default_us``: that of the library's own choice, in turns on a hot GPU."""

    problem: Problem
    algorithm: Algorithm
    us: float
    default_us: float

    def as_json(self) -> dict[str, Any]:
        times = {"us": self.us, "default_us": self.default_us}
        return asdict(self.problem) | asdict(self.algorithm) | times

    @classmethod
    def of_json(cls, entry: Mapping[str, Any]) -> Recorded:
        problem = Problem(**{field.name: entry[field.name] for field in fields(Problem)})
        algorithm = Algorithm(**{field.name: entry[field.name] for field in fields(Algorithm)})
        return cls(problem=problem, algorithm=algorithm, us=entry["us"], default_us=entry["default_us"])


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """``gpu`` as PyTorch names it; ``version``: cuBLASLt's, major and minor, whose numbers these are."""

    gpu: str
    version: str
    recorded: tuple[Recorded, ...]

    @property
    def algorithms(self) -> dict[Problem, Algorithm]:
        return {entry.problem: entry.algorithm for entry in self.recorded}

    def to_json(self) -> str:
        """An entry a line."""
        lines = ",\n".join(f"  {json.dumps(entry.as_json())}" for entry in self.recorded)
        return f'{{"gpu": "{self.gpu}", "version": "{self.version}", "recorded": [\n{lines}\n]}}\n'

    @classmethod
    def of_json(cls, text: str) -> Table:
        document = json.loads(text)
        recorded = tuple(Recorded.of_json(entry) for entry in document["recorded"])
        return cls(gpu=document["gpu"], version=document["version"], recorded=recorded)


def file_name(gpu: str) -> str:
    """ "NVIDIA H200": nvidia_h200.json."""
    return re.sub(r"[^a-z0-9]+", "_", gpu.lower()) + ".json"


def table_of(gpu: str) -> Table | None:
    """What comes with Troupe for that GPU."""
    path = files("engines.torch_engine.cublaslt") / "recorded" / file_name(gpu)
    return Table.of_json(path.read_text()) if path.is_file() else None
