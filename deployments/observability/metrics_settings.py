"""Settings of the address where Prometheus reads metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from deployments.names import url_at

DEFAULT_PORT = 9464


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricsSettings:
    """Address of ``/metrics``."""

    host: str = "127.0.0.1"
    """Address to bind."""
    port: int | Literal["auto"] | None = "auto"
    """None: no metrics; ``auto``: DEFAULT_PORT, or in ``troupe serve`` the next free one."""

    def __post_init__(self) -> None:
        if self.number is not None and not 0 < self.number <= 65535:
            raise ValueError(f"metrics.port is {self.port}; it must be auto, from 1 to 65535, or null for no metrics")

    @property
    def number(self) -> int | None:
        """The port; None without metrics."""
        return DEFAULT_PORT if self.port == "auto" else self.port

    @property
    def url(self) -> str:
        """The URL on this machine; empty without metrics."""
        return "" if self.number is None else f"{url_at(self.host, self.number)}/metrics"
