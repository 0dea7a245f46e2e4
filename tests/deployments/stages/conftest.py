"""Stages hide from diffusers what they do without, where they are the first to import it: here other tests want it."""

from __future__ import annotations

import diffusers.utils.import_utils  # noqa: F401
