"""Configuration of the door."""

from __future__ import annotations

from dataclasses import dataclass

from deployments.checks import check_positive


@dataclass(frozen=True, kw_only=True, slots=True)
class DoorSettings:
    """Limits on connections and request heads, enforced in HAProxy."""

    max_connections: int = 2000
    """Connections at a time; more wait in the kernel."""
    max_head_bytes: int = 16384
    """Size limit of a head: request line and headers."""
    head_timeout_s: float = 10.0
    """Time for a whole head to arrive."""
    idle_timeout_s: float = 60.0
    """Time after which a client that neither sends nor receives is disconnected."""
    drain_s: float = 30.0
    """Time for running requests after SIGTERM."""

    def __post_init__(self) -> None:
        check_positive(self, "max_connections", "max_head_bytes", "head_timeout_s", "idle_timeout_s", section="door")
        if self.drain_s < 0:
            raise ValueError(f"door.drain_s is {self.drain_s}; it must be 0 or more")
