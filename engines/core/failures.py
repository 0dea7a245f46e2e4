"""How a job ends that is wrong in itself, on a gang that is as it was before."""

from __future__ import annotations


class JobFailedError(RuntimeError):
    """The job's own computation failed, and would on another gang. The message says how; ranks are not at fault."""
