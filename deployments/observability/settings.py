"""What a configuration may say of metrics."""

from __future__ import annotations

from dataclasses import dataclass

from deployments.names import url_at


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
        return "" if self.port is None else f"{url_at(self.host, self.port)}/metrics"
