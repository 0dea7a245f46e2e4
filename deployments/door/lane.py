"""The picture queue in HAProxy, which lets a full application refuse requests at once.

Each request, refused or not, costs Ray's proxy and the ingress some 20 ms of CPU time: the last of hundreds would wait
ten seconds for its refusal. The queue admits as many as the application has places for, and ``SPARE``.
When the application is full for any picture, its refusal has ``FULL_HEADER``. HAProxy then refuses queued and new
requests until a place is free or a second has passed. The application judges the next request again.

HAProxy has no rules for requests that leave a queue. The queue is therefore that of a server which is this HAProxy
itself: a second frontend, on a socket of its own, has the rules.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from deployments.config import AppConfig, ModelConfig
from deployments.door.answers import ALL_TAKEN, WAITED_TOO_LONG, slow_body
from deployments.names import FULL_HEADER
from pipelines.checkpoint import Checkpoint

PICTURES = "{ method POST } { path_beg /v1/images/ }"
SPARE = 8
"""Requests admitted beyond the number of places: on their way in or out, or to be refused."""
QUEUE_S = 30
WORD_MS = 1000
"""How long a refusal by the application applies here; it may have other clients."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lane:
    """The queue of an application with ``num_places`` pictures at a time and ``body_deadline_s`` for bodies."""

    num_places: int
    body_deadline_s: float

    @classmethod
    def of(cls, app: AppConfig) -> Lane:
        num_places = sum(app.max_open_pictures[model.name] for model in app.models if may_draw(model))
        return cls(num_places=app.api.num_replicas * num_places, body_deadline_s=app.api.body_deadline_s)

    def initial_word(self) -> Iterator[str]:
        """Yield lines of the section ``global``."""
        for name in ("full", "wait", "until"):
            yield f"    set-var proc.{name} int(0)"

    def choice(self, max_waiting_bytes: int, patient: str) -> Iterator[str]:
        """Yield rules of the main frontend. Bodies above ``max_waiting_bytes`` fit no buffer and are not queued.

        Nor are requests under the condition ``patient``, whose client may close its side before the answer.
        """
        yield f"    use_backend pictures_patient if {PICTURES} {patient}"
        yield f"    use_backend pictures if {PICTURES} {{ req.body_size le {max_waiting_bytes} }}"
        yield f"    use_backend pictures_large if {PICTURES}"

    def sections(self, folder: Path) -> Iterator[str]:
        """Yield the queue's own sections. ``folder`` is for pages and the socket."""
        socket = f"unix@{folder / 'lane.sock'}"
        yield "backend pictures"
        # A body that never arrives must not occupy a place.
        yield f"    http-request wait-for-body time {round(1000 * self.body_deadline_s)}ms"
        yield f"    errorfile 408 {slow_body(self.body_deadline_s).write(folder)}"
        yield f"    errorfile 503 {WAITED_TOO_LONG.write(folder)}"
        yield f"    timeout queue {QUEUE_S}s"
        yield "    option http-server-close"
        yield f"    server lane {socket} maxconn {self.num_places + SPARE}"
        yield "backend pictures_large"
        yield "    option http-server-close"
        yield f"    server lane {socket}"
        yield "backend pictures_patient"
        yield "    no option abortonclose"
        yield "    option http-server-close"
        yield f"    server lane {socket}"
        yield from _queue_frontend(socket)


def may_draw(model: ModelConfig) -> bool:
    """Return whether the model makes pictures; True if its files are on another machine."""
    try:
        return "image" in Checkpoint.open(model.source, weights=False).defaults.kinds
    except (OSError, ValueError):
        return True


def _queue_frontend(socket: str) -> Iterator[str]:
    yield "frontend lane"
    yield f"    bind {socket} mode 600"
    yield "    acl has_the_word date(0,ms),sub(proc.until) lt 0"
    yield "    acl no_fewer_than_then fe_conn,sub(proc.full) ge 0"
    yield f"    http-request {ALL_TAKEN.action} if has_the_word no_fewer_than_then"
    yield "    http-request set-var(proc.until) int(0)"
    said = f"if {{ res.hdr({FULL_HEADER}) -m found }}"
    yield f"    http-response set-var(proc.full) fe_conn {said}"
    yield f"    http-response set-var(proc.wait) res.hdr_val({FULL_HEADER}) {said}"
    yield f"    http-response set-var(proc.until) date({WORD_MS},ms) {said}"
    yield f"    http-response del-header {FULL_HEADER}"
    yield "    default_backend application"
