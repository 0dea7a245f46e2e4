"""A clock that a test sets, and keys with limits."""

from __future__ import annotations

import pytest

from deployments.usage.api_keys import hash_of

MINE, OTHER = hash_of("mine"), hash_of("other")


class SetTime:
    """A clock in seconds, which stands still."""

    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> SetTime:
    return SetTime()
