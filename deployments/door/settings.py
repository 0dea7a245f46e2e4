"""Configuration of the door."""

from __future__ import annotations

from dataclasses import dataclass

from deployments.checks import check_positive


@dataclass(frozen=True, kw_only=True, slots=True)
class DoorSettings:
    """Limits on connections and request heads, enforced before anything of a request reaches Python.

    A head (request line and headers) of more than ``max_head_bytes``, or one that takes longer than ``head_timeout_s``,
    is refused, as is a connection beyond ``max_connections``. A client that neither sends nor takes what is under way
    for ``idle_timeout_s`` is let go. After SIGTERM, work under way gets ``drain_s`` to finish.
    """

    max_connections: int = 2000
    max_head_bytes: int = 16384
    head_timeout_s: float = 10.0
    idle_timeout_s: float = 60.0
    drain_s: float = 30.0

    def __post_init__(self) -> None:
        check_positive(self, "max_connections", "max_head_bytes", "head_timeout_s", "idle_timeout_s", section="door")
        if self.drain_s < 0:
            raise ValueError(f"door.drain_s is {self.drain_s}; it must be 0 or more")
