"""Clip records: their types, and how they stand in the database."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from deployments.clips.webhooks import Webhook, webhook_from_json
from deployments.database.tables import ClipRow
from deployments.service.interface import StageTimes
from pipelines.request import Lora, MediaRequest, SecondStage
from pipelines.solver import Solver

ClipStatus = Literal["queued", "in_progress", "completed", "failed"]
OPEN = ("queued", "in_progress")
FILE_GONE = "file_gone"
"""Error code of a completed clip whose file is gone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipError:
    """The failure of a clip."""

    code: str
    """Code for programs."""
    message: str
    """Explanation for people."""
    retry_after_s: float | None = None
    """Seconds after which a new request may succeed; None: unknown."""
    gpu_s: float | None = None
    """GPU seconds of the last attempt, if known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipRecord:
    """A requested clip. Times are Unix seconds."""

    id: str
    """``video_`` and 128 random bits."""
    number: int
    """Order of creation."""
    request: MediaRequest
    """Request for the clip."""
    seconds: str
    """Duration of the clip, as text."""
    status: ClipStatus
    """State, as one of OpenAI's values."""
    progress: int
    """0 to 100."""
    num_previews: int
    """Previews that can be had."""
    attempts: int
    """Runs that have begun."""
    created_at_s: float
    """Unix time of the client's request."""
    completed_at: int | None
    """Unix time of its end; None before."""
    error: ClipError | None
    """Why it failed; None if it did not."""
    timings: StageTimes | None
    """Times of its stages; None before the end."""
    key_hash: str = ""
    """Hash of the API key that it is of; empty without keys."""
    webhook: Webhook | None = None
    """Receiver of the message about its end."""
    eta_at_s: float | None = None
    """Predicted end; None: unknown."""
    num_before: int | None = None
    """Position in the queue; None if it does not wait."""

    @property
    def created_at(self) -> int:
        return int(self.created_at_s)

    @property
    def gpu_s(self) -> float | None:
        """GPU seconds of an ended clip; None while unknown."""
        if self.timings is not None:
            return self.timings.gpu_s
        return None if self.error is None else self.error.gpu_s

    @property
    def is_open(self) -> bool:
        """True if the clip is queued or in progress."""
        return self.status in OPEN

    @property
    def eta_s(self) -> float | None:
        """Predicted seconds until its end; None once it has ended."""
        return None if self.eta_at_s is None or not self.is_open else max(0.0, self.eta_at_s - time.time())


def record_of(row: ClipRow) -> ClipRecord:
    return ClipRecord(
        id=row.id,
        number=row.number,
        request=request_from_json(row.request_json),
        seconds=row.seconds,
        status=row.status,  # type: ignore[arg-type]
        progress=row.progress,
        num_previews=row.num_previews,
        attempts=row.attempts,
        created_at_s=row.created_at_s,
        completed_at=None if row.completed_at_s is None else int(row.completed_at_s),
        error=None if row.error_json is None else ClipError(**json.loads(row.error_json)),
        timings=None if row.timings_json is None else StageTimes(**json.loads(row.timings_json)),
        key_hash=row.key_hash,
        webhook=webhook_from_json(row.webhook_json),
        eta_at_s=row.eta_at_s,
    )


def to_json(record: MediaRequest | ClipError | StageTimes) -> str:
    return json.dumps(asdict(record))


def request_from_json(text: str) -> MediaRequest:
    fields = json.loads(text, object_hook=_with_tuples)
    fields["loras"] = _loras(fields.get("loras", ()))
    fields["solver"] = Solver(**fields.get("solver", {}))
    if second := fields.get("second_stage"):
        fields["second_stage"] = SecondStage(**second | {"loras": _loras(second["loras"])})
    return MediaRequest(**fields)


def _with_tuples(fields: dict[str, Any]) -> dict[str, Any]:
    """Return ``fields`` with tuples for JSON's lists."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}


def _loras(written: Iterable[dict[str, Any]]) -> tuple[Lora, ...]:
    return tuple(Lora(**one) for one in written)
