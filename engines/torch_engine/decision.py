"""Decision of a gang how to divide steps, and its file: a rebuilt gang gives a seed the same bytes."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from engines.core.estimates import StepEstimates
from engines.core.spec import ParallelSpec
from engines.core.storage import file_about, write_atomically, write_once
from engines.parallel.division import TeamSpecs
from engines.torch_engine.exchange.choose import ExchangeRules

logger = logging.getLogger(__name__)

REVISION = 2
"""Raise it if steps of the same version would get another decision: by other candidates, timing or cost model, or by
exchanges or kernels of another speed. Gangs then decide again, once. Files without a revision are the oldest."""
MIN_BRANCHES = 2
"""A decision covers one branch alone and two at once, at least."""

Specs = tuple[ParallelSpec, ...]
"""How a team divides one branch, two at once, and so on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """A gang's decision."""

    specs: TeamSpecs
    """How teams of each size divide a step."""
    exchange: ExchangeRules
    """How ranks exchange heads."""
    estimates: StepEstimates | None = None
    """The cost model's step times for these divisions; None: unknown."""

    def describe(self) -> str:
        specs = self.specs
        names = (f"{size}: {' or '.join(spec.name for spec in dict.fromkeys(specs.of(size)))}" for size in specs.sizes)
        return f"{'; '.join(names)}; exchange {self.exchange.describe()}"


@dataclass(frozen=True, kw_only=True, slots=True)
class DecisionFile:
    """The file of a decision."""

    folder: Path
    """Folder of all decisions."""
    name: str
    """Prefix of the file name, which ends with a digest of the facts."""
    facts: Mapping[str, str]
    """Conditions of the decision: model, machine, software and configuration."""
    check: Callable[[ParallelSpec], None] = lambda _: None
    """Raises ValueError for a strategy that the model cannot use."""

    @property
    def path(self) -> Path:
        return file_about(self.folder, self.name, self.facts)

    def read(self, sizes: tuple[int, ...]) -> Decision | None:
        """Return the decision on teams of ``sizes``, or None. An unusable file is logged."""
        try:
            document = json.loads(self.path.read_text())
            if document["facts"] != dict(self.facts):
                raise ValueError("it belongs to another machine, model or software")
            names = {int(size): named for size, named in document["strategies"].items()}
            if tuple(sorted(names)) != sizes:
                raise ValueError(f"it has teams of {sorted(names)} ranks, and those here are of {list(sizes)}")
            estimates = document["estimates"]
            return Decision(
                specs=TeamSpecs(by_size={size: self._specs(names[size], size) for size in sizes}),
                exchange=ExchangeRules(**document["exchange"]),
                estimates=None if estimates is None else StepEstimates.of_document(estimates),
            )
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            logger.warning("decision file %s is unusable and will be rewritten: %s", self.path, error)
            return None

    def write(self, decision: Decision, times_ms: Mapping[str, float]) -> Decision:
        """Write ``decision`` unless another gang was first. Return the valid one."""
        specs, estimates = decision.specs, decision.estimates
        document = {
            "facts": dict(self.facts),
            "strategies": {str(size): [spec.name for spec in specs.of(size)] for size in specs.sizes},
            "exchange": asdict(decision.exchange),
            "estimates": None if estimates is None else estimates.to_document(),
            "times_ms": dict(times_ms),
        }
        data = json.dumps(document, indent=1).encode()
        try:
            if not write_once(self.path, data):
                if first := self.read(specs.sizes):
                    return first
                write_atomically(self.path, data)
        except OSError as error:  # the next start decides again, perhaps differently
            logger.warning("the decision on a strategy cannot be written to %s: %s", self.path, error)
        return decision

    def _specs(self, names: list[str], size: int) -> Specs:
        specs = tuple(ParallelSpec.of(name, size) if size > 1 else ParallelSpec() for name in names)
        if len(specs) < MIN_BRANCHES or any(spec.num_ranks != size for spec in specs):
            raise ValueError(f"{names} do not divide steps over {size} ranks")
        for spec in specs:
            self.check(spec)
        return specs
