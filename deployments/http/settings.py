"""Settings of the HTTP API."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from ipaddress import ip_network
from pathlib import Path

from deployments.checks import check_positive
from deployments.requests.pictures.limits import PictureLimits
from deployments.usage.api_keys import KeyRing
from deployments.usage.quotas import KeyLimits

HOST = re.compile(r"\*|(\*\.)?[\w.-]+")
PUBLIC_URL = re.compile(r"https?://[^/?#\s]+(/[^?#\s]*)?")
ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/\s]+")


@dataclass(frozen=True, kw_only=True)
class ApiLimits(PictureLimits):
    """Configurable limits of the API. It has no slots, since its configuration section has a second such parent.

    ``public_url`` replaces the host of the request in URLs of answers (behind a proxy that rewrites it). A body must
    arrive within ``body_deadline_s`` of its request. It has at most ``max_body_bytes``, or ``max_upload_bytes`` where
    pictures are allowed. All open uploads of a replica take about ``max_open_upload_bytes`` of memory. A replica works
    on ``max_open_requests`` at a time; ``max_watchers`` of them may be streams of a clip's events.

    ``allowed_hosts`` are names of the server beside its own. Pages of ``allowed_origins`` may send requests, beside its
    own pages. ``X-Forwarded`` headers of ``trusted_proxies`` (addresses or networks) are believed.

    ``key_limits`` are limits of API keys, for all replicas together.

    An adapter that a client adds has at most ``max_lora_bytes``; one may be named by its path in ``lora_folders``.

    Files that one key uploads under ``/v1/files``, and those of its batches, take at most ``max_stored_bytes``.

    Results of one key are hidden from all others, unless ``share_between_keys`` is set.
    """

    max_body_bytes: int = 1 << 20
    max_upload_bytes: int = 64 << 20
    max_open_upload_bytes: int = 1 << 30
    body_deadline_s: float = 30.0
    max_images_per_request: int = 4
    public_url: str = ""
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    trusted_proxies: tuple[str, ...] = ()
    share_between_keys: bool = False
    max_open_requests: int = 2048
    max_watchers: int = 1000
    key_limits: tuple[KeyLimits, ...] = ()
    max_lora_bytes: int = 2 << 30
    lora_folders: tuple[Path, ...] = ()
    max_stored_bytes: int = 16 << 30

    def __post_init__(self) -> None:
        PictureLimits.__post_init__(self)
        check_positive(
            self,
            "max_body_bytes",
            "max_upload_bytes",
            "max_open_upload_bytes",
            "body_deadline_s",
            "max_images_per_request",
            "max_open_requests",
            "max_watchers",
            "max_lora_bytes",
            "max_stored_bytes",
        )
        _check_all("allowed_hosts", self.allowed_hosts, HOST, "* or a name without port, such as gpu1.example.com")
        _check_all("allowed_origins", self.allowed_origins, ORIGIN, "* or as browsers send it: https://example.com")
        if self.public_url and not PUBLIC_URL.fullmatch(self.public_url):
            raise ValueError(f"public_url is {self.public_url!r}; it must be a URL such as https://gpu1.example.com")
        for folder in self.lora_folders:
            if not folder.is_absolute():
                raise ValueError(f"lora_folders holds {str(folder)!r}; it must be an absolute path")
        for proxy in self.trusted_proxies:
            try:
                ip_network(proxy, strict=False)
            except ValueError:
                message = f"trusted_proxies holds {proxy!r}; it must be an address or a network, such as 10.0.0.0/8"
                raise ValueError(message) from None


@dataclass(frozen=True, kw_only=True)
class ApiSettings(ApiLimits):
    """Limits and places of the API. ValueError if one cannot work.

    ``data_dir`` holds pictures served by URL and the clips. Without ``keys``, requests need none.
    ``own_names`` are names of the machine. ``max_open_pictures`` limits the pictures under way in a replica, by model;
    ``is_only_replica``: no other replica has further places.
    ``max_files_bytes`` and ``file_lifetime_s`` limit the files that ``response_format=url`` leaves on the disk.
    An idle stream sends a comment every ``keepalive_s``. It is answered after ``first_event_wait_s`` even if the job
    still waits; an error before that has its own HTTP status.
    ``signed_urls``: answers have URLs of the object storage in place of its contents.
    ``sends_request_id`` is False where a proxy adds ``X-Request-Id`` to every answer already, as Ray Serve's does.
    """

    data_dir: Path
    own_names: tuple[str, ...] = ()
    keys: KeyRing = field(default_factory=KeyRing, repr=False)
    max_open_pictures: Mapping[str, int] = field(default_factory=dict)
    is_only_replica: bool = True
    signed_urls: bool = False
    file_lifetime_s: float = 3600.0
    max_files_bytes: int = 1 << 30
    sends_request_id: bool = True
    keepalive_s: float = 10.0
    first_event_wait_s: float = 2.0
    video_poll_s: float = 0.5

    def __post_init__(self) -> None:
        ApiLimits.__post_init__(self)
        check_positive(self, "file_lifetime_s", "max_files_bytes", "keepalive_s", "video_poll_s")


def _check_all(name: str, values: Iterable[str], pattern: re.Pattern[str], allowed: str) -> None:
    for value in values:
        if not pattern.fullmatch(value):
            raise ValueError(f"{name} holds {value!r}; it must be {allowed}")
