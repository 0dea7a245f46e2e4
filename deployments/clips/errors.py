"""What can go wrong with durable jobs."""

from __future__ import annotations

from engines.gang.errors import QueueFullError


class TooManyJobsError(QueueFullError):
    """As many durable jobs wait as may, whatever room the gangs have."""
