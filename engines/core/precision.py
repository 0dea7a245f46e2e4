"""What the engine knows, for those who check a configuration and need no torch for it."""

from __future__ import annotations

PRECISIONS = ("auto", "native", "fp8", "fp8-static", "int8")
