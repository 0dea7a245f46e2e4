"""Settings of hypothesis without a clock: a process of low priority may wait long for a core."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck

UNHURRIED: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
