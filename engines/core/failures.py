"""The error of a job that fails by itself and leaves its gang intact."""

from __future__ import annotations


class JobFailedError(RuntimeError):
    """The job's own computation failed, and would on another gang. The message says how; the ranks are intact."""
