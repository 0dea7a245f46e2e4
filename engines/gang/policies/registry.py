"""Policies by the names that a configuration may use, imported when they are asked for."""

from __future__ import annotations

from importlib import import_module
from typing import cast

from engines.gang.policies.policy import Policy

POLICIES = {
    "shortest": "engines.gang.policies.shortest:Shortest",
    "deadline": "engines.gang.policies.deadline:Deadline",
    "fair": "engines.gang.policies.fair:Fair",
    "arrival": "engines.gang.policies.arrival:Arrival",
}


def find_policy(name: str) -> str:
    """Return where the policy of that name is. ValueError lists the known names."""
    if name not in POLICIES:
        raise ValueError(f"unknown policy {name!r}; known: {', '.join(POLICIES)}")
    return POLICIES[name]


def make_policy(name: str) -> Policy:
    """Return a new policy of that name, for one gang. ValueError lists the known names."""
    module, _, class_name = find_policy(name).partition(":")
    return cast(Policy, getattr(import_module(module), class_name)())
