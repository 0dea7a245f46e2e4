"""What a configuration may say of metrics."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricsSettings:
    """Where Prometheus finds them: ``/metrics`` on this address, of a port of its own. Without a port, nowhere."""

    host: str = "127.0.0.1"
    port: int | None = 9464

    def __post_init__(self) -> None:
        if self.port is not None and not 0 < self.port <= 65535:
            raise ValueError(f"metrics.port is {self.port}; it must be from 1 to 65535, or null for no metrics")

    @property
    def url(self) -> str:
        """The URL on this machine; empty without metrics."""
        host = "127.0.0.1" if self.host in ("0.0.0.0", "") else self.host
        return "" if self.port is None else f"http://{f'[{host}]' if ':' in host else host}:{self.port}/metrics"
