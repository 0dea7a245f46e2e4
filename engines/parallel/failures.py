"""Whether a forward that failed may have left other ranks waiting."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from engines.core.failures import JobFailedError
from engines.parallel.communication.collectives import num_started

RANKS_AT_FAULT = (torch.AcceleratorError, torch.OutOfMemoryError, dist.DistError, MemoryError)
"""What devices and communicators raise: no other job of the gang can go on after it."""


@contextmanager
def forward_fails_alone() -> Iterator[None]:
    """Raise ``JobFailedError`` for what fails inside before anything was exchanged: shapes, dtypes, missing inputs.

    All ranks compute the same, so all of them fail alike, and their communicator is as it was. A ``ValueError`` stays
    one, and so does whatever comes after an exchange, or from a device.
    """
    before = num_started()
    try:
        yield
    except (ValueError, *RANKS_AT_FAULT):
        raise
    except Exception as error:
        if num_started() != before:
            raise
        raise JobFailedError(f"the model's forward fails: {type(error).__name__}: {error}") from error
