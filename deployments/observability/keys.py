"""Metric labels of API keys, limited in number."""

from __future__ import annotations

from collections.abc import Callable

from deployments.observability.metrics import observe_gpu_seconds
from deployments.usage.quotas import EVERYBODY, KeyLimits

SHOWN_DIGITS = 8
MAX_UNNAMED = 100
OTHERS = "other"


class KeyNames:
    """Metric labels: a key's configured ``name``, else eight digits of its hash; ``OTHERS`` after ``MAX_UNNAMED``."""

    def __init__(self, limits_of: Callable[[str], KeyLimits]) -> None:
        self._limits_of = limits_of
        self._unnamed: set[str] = set()

    def name_of(self, key: str) -> str:
        limits, digits = self._limits_of(key), key[:SHOWN_DIGITS]
        if limits.name and limits.key != EVERYBODY:
            return limits.name
        if digits not in self._unnamed and len(self._unnamed) >= MAX_UNNAMED:
            return OTHERS
        self._unnamed.add(digits)
        return digits

    def observe_gpu_seconds(self, model: str, key: str, gpu_s: float) -> None:
        """Count the seconds of ranks for a request of ``key`` that has ended."""
        observe_gpu_seconds(model, self.name_of(key), gpu_s)
