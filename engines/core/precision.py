"""The configurable precisions of an engine's linear layers. Free of torch."""

from __future__ import annotations

from typing import Literal

Scheme = Literal["int8", "fp8"]
"""Symmetric int8, or float8 e4m3 (arXiv:2209.05433)."""

PRECISIONS = ("auto", "native", "fp8", "fp8-static", "int8", "int8-static")
"""``native`` (and "auto") computes in the model's dtype. The others quantise weights by row, and activations with a
scale per row or, if "static", with fixed scales from a calibration."""

STATIC = "-static"


def scheme_of(precision: str) -> Scheme | None:
    """Return how the linears are quantised; None if they are not."""
    match precision.removesuffix(STATIC):
        case "int8":
            return "int8"
        case "fp8":
            return "fp8"
        case _:
            return None


def is_static(precision: str) -> bool:
    """Return whether activation scales come from a calibration."""
    return precision.endswith(STATIC)


def check_known(precision: str, known: tuple[str, ...], engine: str) -> None:
    """Raise ValueError, with the precisions ``known`` to ``engine``, for any other."""
    if precision not in known:
        raise ValueError(f"precision is {precision!r}; the {engine} engine knows {', '.join(known)}")
