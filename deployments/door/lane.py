"""The lane: how requests for pictures go through the door, so that a full application refuses them at once.

Each request costs Ray's proxy and the ingress some 20 ms of CPU time, a refusal like all others: of hundreds at once
the last would hear it after ten seconds. So no more of them are in the application at a time than it has places for,
and ``SPARE``; the others wait in the door's queue. When the application refuses one because no picture has a place,
whatever it asks for, it says so (``FULL_HEADER``), and the door refuses those that wait and those that come, until
fewer are in the application than there were then, or a second has passed. Then the next one is the application's to
judge again. So the door refuses only what the application would.

HAProxy has no rules for requests that leave a queue. Therefore this one is the queue of a server that is this very
HAProxy: a second frontend, on a socket of its own, has the rules.
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
"""Requests in the application beside those that have a place: on their way in or out, or to be refused."""
QUEUE_S = 30
WORD_MS = 1000
"""How long the application's word lasts: where others ask it too, not all that end are seen here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lane:
    """For an application that takes ``num_places`` pictures at a time, and bodies within ``body_deadline_s``."""

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
        """Yield lines of the door's frontend. Bodies above ``max_waiting_bytes``, which fit no buffer, do not wait.

        Nor do requests under the condition ``patient``, whose client may close its side before the answer.
        """
        yield f"    use_backend pictures_patient if {PICTURES} {patient}"
        yield f"    use_backend pictures if {PICTURES} {{ req.body_size le {max_waiting_bytes} }}"
        yield f"    use_backend pictures_large if {PICTURES}"

    def sections(self, folder: Path) -> Iterator[str]:
        """Yield sections of their own. ``folder`` is for pages and the socket."""
        socket = f"unix@{folder / 'lane.sock'}"
        yield "backend pictures"
        # Nobody takes a place in the lane by a body that never comes.
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
        yield from _frontend(socket)


def may_draw(model: ModelConfig) -> bool:
    """Return False for a model of clips alone; True for others, and for one whose files are on other machines."""
    try:
        return "image" in Checkpoint.open(model.source, weights=False).defaults.kinds
    except (OSError, ValueError):
        return True


def _frontend(socket: str) -> Iterator[str]:
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
