"""Validation of settings."""

from __future__ import annotations


def check_positive(settings: object, *names: str, section: str = "") -> None:
    """Raise ValueError unless the fields ``names`` are above 0 or None. ``section`` is their section in the file."""
    for name in names:
        value = getattr(settings, name)
        if value is not None and not value > 0:
            raise ValueError(f"{f'{section}.' if section else ''}{name} is {value}; it must be above 0")
