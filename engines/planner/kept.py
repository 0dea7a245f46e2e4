"""What "auto" decided once, in files: a gang that is rebuilt, and another of the model, divide their steps alike."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from engines.core.estimates import StepEstimates
from engines.core.spec import ParallelSpec
from engines.core.storage.files import file_about, write_atomically, write_once
from engines.parallel.division import TeamSpecs
from engines.planner.exchange_rules import ExchangeRules

MIN_BRANCHES = 2
"""One alone, and two at once: a division for each, at least."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """How teams divide a step, by which rules they exchange heads (None: as is usual), and what the cost model says of
    such steps (None: nothing). Older files do not say the latter two."""

    specs: TeamSpecs
    exchange: ExchangeRules | None = None
    estimates: StepEstimates | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptDecision:
    """The decision for ``facts``: what is served, on which machine, by which software. It lies in ``folder``, in a file
    whose name begins with ``name`` and has a digest of the facts."""

    folder: Path
    name: str
    facts: Mapping[str, str]

    def about(self, facts: Mapping[str, str]) -> KeptDecision:
        """Returns the decision for these facts as well."""
        return replace(self, facts={**self.facts, **facts})

    @property
    def file(self) -> Path:
        return file_about(self.folder, self.name, self.facts)

    def find(self, sizes: tuple[int, ...]) -> Decision | None:
        """Returns what was decided for teams of ``sizes``; None where nothing was, or the file is no use, which the log
        says."""
        try:
            kept = json.loads(self.file.read_text())
            if kept["facts"] != dict(self.facts):
                raise ValueError("it belongs to another machine, model or software")
            names = {int(size): named for size, named in kept["strategies"].items()}
            if tuple(sorted(names)) != sizes:
                raise ValueError(f"it has teams of {sorted(names)} ranks, and those here are of {list(sizes)}")
            specs = TeamSpecs(by_size={size: _specs(names[size], size) for size in sizes})
            exchange, estimates = _exchange(kept.get("exchange")), _estimates(kept.get("estimates"))
            return Decision(specs=specs, exchange=exchange, estimates=estimates)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            logger.warning("%s holds no decision (%s): it is made anew", self.file, error)
            return None

    def keep(self, decision: Decision, times_ms: Mapping[str, float]) -> Decision:
        """Writes the decision, unless another gang was first. Returns the one that counts."""
        specs, exchange, estimates = decision.specs, decision.exchange, decision.estimates
        kept = {
            "facts": dict(self.facts),
            "strategies": {str(size): [spec.name for spec in specs.of(size)] for size in specs.sizes},
            "exchange": None if exchange is None else asdict(exchange),
            "estimates": None if estimates is None else estimates.to_document(),
            "times_ms": dict(times_ms),
        }
        data = json.dumps(kept, indent=1).encode()
        try:
            if not write_once(self.file, data):
                if first := self.find(specs.sizes):
                    return first
                write_atomically(self.file, data)
        except OSError as error:  # the next start decides again, and may decide otherwise
            logger.warning("what was decided cannot be kept in %s: %s", self.file, error)
        return decision


def _exchange(written: dict[str, Any] | None) -> ExchangeRules | None:
    return None if written is None else ExchangeRules(**written)


def _estimates(written: dict[str, Any] | None) -> StepEstimates | None:
    return None if written is None else StepEstimates.of_document(written)


def _specs(names: list[str], size: int) -> tuple[ParallelSpec, ...]:
    specs = tuple(ParallelSpec.of(name, size) if size > 1 else ParallelSpec() for name in names)
    if len(specs) < MIN_BRANCHES or any(spec.num_ranks != size for spec in specs):
        raise ValueError(f"{names} do not divide steps over {size} ranks")
    return specs
