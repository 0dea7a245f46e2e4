"""The precisions that a configuration may ask of an engine's linear layers. Without torch."""

from __future__ import annotations

from typing import Literal

Scheme = Literal["int8", "fp8"]
"""Symmetric int8, or float8 e4m3 (arXiv:2209.05433)."""

PRECISIONS = ("auto", "native", "fp8", "fp8-static", "int8", "int8-static")
"""``native`` computes in the dtype that the model was loaded in; "auto" is that. The others quantise weights by row and
activations with the scale of every row as it comes, or with the fixed ("static") scales that a calibration found.
"""

STATIC = "-static"


def scheme_of(precision: str) -> Scheme | None:
    """Returns how the linears are quantised; None where they are not."""
    match precision.removesuffix(STATIC):
        case "int8":
            return "int8"
        case "fp8":
            return "fp8"
        case _:
            return None


def is_static(precision: str) -> bool:
    """Returns whether the scales of activations come from a calibration."""
    return precision.endswith(STATIC)


def check_known(precision: str, known: tuple[str, ...], engine: str) -> None:
    """Raises ValueError, with what ``engine`` knows, for any other precision."""
    if precision not in known:
        raise ValueError(f"precision is {precision!r}; the {engine} engine knows {', '.join(known)}")
