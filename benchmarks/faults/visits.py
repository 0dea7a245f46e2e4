"""Visits of clients: what each asks for and how long it stays, drawn beforehand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Any, Literal

Kind = Literal["picture", "stream", "edit", "clip", "sync"]
"""``clip``: durable and polled. ``sync``: a clip in one request."""

SHARES: Mapping[Kind, float] = {"picture": 40, "stream": 40, "edit": 6, "clip": 8, "sync": 6}
STORM_SHARE = 0.02
"""Share of turns in which ``STORM_SIZE`` clients come at once, and each goes away."""
STORM_SIZE = 15
LEAVING_SHARE = 0.2
"""Share of the other clients that go away."""
LONGEST_STAY_S = 1.5
TIERS = ("default", "default", "priority", "flex")
SHORT_S, LONG_S = 20.0, 600.0
"""Deadlines of every second request under the policy ``deadline``. Some cannot be met while a gang is rebuilt."""

_SMALL = {"model": "flux-shapes", "prompt": "a red circle", "size": "64x64", "num_inference_steps": 8}
_USUAL = {"model": "flux-shapes", "prompt": "a large blue square on a white background", "num_inference_steps": 12}
_CLIP = {
    "model": "wan-shapes",
    "prompt": "a green triangle moves from left to right on a black background",
    "size": "32x32",
    "num_frames": 9,
    "num_inference_steps": 6,
}
_EDIT = {"model": "kontext-shapes", "prompt": "make the square red", "num_inference_steps": 6}
PICTURES = tuple({**body, "seed": seed} for seed in range(3) for body in (_SMALL, _USUAL))
BODIES: Mapping[Kind, tuple[Mapping[str, Any], ...]] = {
    "picture": PICTURES,
    "stream": PICTURES,
    "edit": tuple({**_EDIT, "seed": seed} for seed in range(2)),
    "clip": tuple({**_CLIP, "seed": seed} for seed in range(2)),
    "sync": tuple({**_CLIP, "seed": seed} for seed in range(2)),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Visit:
    """One request of a client."""

    kind: Kind
    number: int
    """Index among the ``BODIES`` of its kind."""
    key: int
    """Index of the client's API key."""
    tier: str = "default"
    deadline_s: float | None = None
    stays_s: float | None = None
    """The client goes away after that. None: it stays."""
    leaves_at: int | None = None
    """The client leaves the stream at that step."""

    @property
    def body(self) -> dict[str, Any]:
        """The JSON that is sent, without pictures."""
        urgency = {} if self.deadline_s is None else {"deadline_s": self.deadline_s}
        return {**BODIES[self.kind][self.number], "service_tier": self.tier, **urgency}


Turn = tuple[Visit, ...]
"""Visits that begin at the same time: one, or a storm."""


def drawn_turns(num_requests: int, policy: str, num_keys: int, seed: int) -> tuple[Turn, ...]:
    """Return turns of ``num_requests`` in all. The same arguments give the same turns."""
    random, turns, num_left = Random(seed), [], num_requests
    while num_left:
        is_storm = random.random() < STORM_SHARE
        num = min(num_left, STORM_SIZE if is_storm else 1)
        turns.append(tuple(_visit(random, policy, num_keys, leaves=is_storm) for _ in range(num)))
        num_left -= num
    return tuple(turns)


def _visit(random: Random, policy: str, num_keys: int, *, leaves: bool) -> Visit:
    (kind,) = random.choices(tuple(SHARES), tuple(SHARES.values()))
    leaves = leaves or random.random() < LEAVING_SHARE
    at_step = leaves and kind == "stream" and random.random() < 0.5
    in_time = policy == "deadline" and random.random() < 0.5
    return Visit(
        kind=kind,
        number=random.randrange(len(BODIES[kind])),
        key=random.randrange(num_keys),
        tier=random.choice(TIERS),
        deadline_s=random.choice((SHORT_S, LONG_S)) if in_time else None,
        stays_s=random.uniform(0.0, LONGEST_STAY_S) if leaves and not at_step else None,
        leaves_at=random.randint(1, 5) if at_step else None,
    )
