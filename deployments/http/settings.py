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
    """Configurable limits of the API. It has no slots, since its configuration section has a second such parent."""

    max_body_bytes: int = 1 << 20
    """Limit of a body where no pictures are allowed."""
    max_upload_bytes: int = 64 << 20
    """Limit of a body where pictures are allowed."""
    max_open_upload_bytes: int = 1 << 30
    """Approximate limit of the memory that all open uploads of a replica take."""
    body_deadline_s: float = 30.0
    """Time from a request until its body has arrived."""
    max_images_per_request: int = 4
    """Limit of ``n``."""
    public_url: str = ""
    """Replaces the host of the request in URLs of answers, behind a proxy that rewrites it."""
    allowed_hosts: tuple[str, ...] = ()
    """Names of the server beside its own."""
    allowed_origins: tuple[str, ...] = ()
    """Origins of pages that may send requests, beside its own pages."""
    trusted_proxies: tuple[str, ...] = ()
    """Addresses or networks whose ``X-Forwarded`` headers are believed."""
    share_between_keys: bool = False
    """Whether results of one key are visible to the others."""
    max_open_requests: int = 2048
    """Limit of the requests that a replica works on at a time."""
    max_watchers: int = 1000
    """Limit of those among them that are streams of a clip's events."""
    key_limits: tuple[KeyLimits, ...] = ()
    """Limits of API keys, for all replicas together."""
    max_lora_bytes: int = 2 << 30
    """Limit of an adapter that a client adds."""
    lora_folders: tuple[Path, ...] = ()
    """Folders where a client may name an adapter by its path."""
    max_stored_bytes: int = 16 << 30
    """Limit of the files that one key uploads under ``/v1/files``, and those of its batches."""
    keep_batches_s: float | None = None
    """Age at which records of ended batches are deleted; None keeps them."""

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
            "keep_batches_s",
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
    """Limits and places of the API. ValueError if one cannot work."""

    data_dir: Path
    """Folder of the clips, and of pictures served by URL."""
    own_names: tuple[str, ...] = ()
    """Names of the machine."""
    keys: KeyRing = field(default_factory=KeyRing, repr=False)
    """Without keys, requests need none."""
    max_open_pictures: Mapping[str, int] = field(default_factory=dict)
    """Limits of the pictures under way in a replica, by model."""
    is_only_replica: bool = True
    """No other replica has further places."""
    signed_urls: bool = False
    """Answers have URLs of the object storage in place of its contents."""
    file_lifetime_s: float = 3600.0
    """Age at which a file of ``response_format=url`` is deleted."""
    max_files_bytes: int = 1 << 30
    """Limit of these files on the disk."""
    sends_request_id: bool = True
    """False where a proxy adds ``X-Request-Id`` to every answer already, as Ray Serve's does."""
    keepalive_s: float = 10.0
    """Interval of comments in an idle stream."""
    first_event_wait_s: float = 2.0
    """A stream is answered after this time even if the job still waits.

    An error before that has its own HTTP status."""
    video_poll_s: float = 0.5
    """Interval at which records of clips and batches are read."""

    def __post_init__(self) -> None:
        ApiLimits.__post_init__(self)
        check_positive(self, "file_lifetime_s", "max_files_bytes", "keepalive_s", "video_poll_s")


def _check_all(name: str, values: Iterable[str], pattern: re.Pattern[str], allowed: str) -> None:
    for value in values:
        if not pattern.fullmatch(value):
            raise ValueError(f"{name} holds {value!r}; it must be {allowed}")
