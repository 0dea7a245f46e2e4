"""Division of one step over ranks: a degree per strategy, validated once against the model.

Free of torch, since schedulers use it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, get_args

STRATEGIES = ("ulysses", "ring", "allgather_kv", "hybrid", "tensor", "guidance", "pipeline")
"""Configurable names besides "auto", alone or as a product ("guidance2xulysses2")."""

AXES = ("guidance", "pipeline", "ring", "allgather_kv", "ulysses", "tensor")
"""Mesh axes from the outermost to the innermost: neighbours on the last axes are neighbours in rank order."""

_FACTOR = re.compile(r"([a-z_]+?)([1-9]\d*)?")
_SPREAD_FIRST = ("ulysses", "allgather_kv", "ring", "tensor")
_KEEP_FIRST = ("tensor", "pipeline", "ulysses", "allgather_kv", "ring", "guidance")


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelSpec:
    """Degrees of every strategy; their product is the number of ranks that work on a step.

    ``ring`` × ``ulysses`` is hybrid or unified sequence parallelism (arXiv:2405.07719).
    """

    guidance: int = 1
    """Branches of a step that run in parallel, each on an equal share of the ranks."""
    pipeline: int = 1
    """Stages of consecutive blocks."""
    ring: int = 1
    """Ranks that pass keys and values round while each keeps its queries."""
    allgather_kv: int = 1
    """Ranks that gather all keys and values."""
    ulysses: int = 1
    """Ranks that exchange tokens for heads."""
    tensor: int = 1
    """Ranks that split each layer's features."""

    def __post_init__(self) -> None:
        degrees = {axis: self.degree(axis) for axis in AXES}
        if min(degrees.values()) < 1:
            raise ValueError(f"every degree must be at least 1, not {degrees}")
        if self.ring > 1 and self.allgather_kv > 1:
            raise ValueError("ring and allgather_kv both bring the keys together: use one of them")

    @classmethod
    def of(cls, strategy: str, num_ranks: int) -> ParallelSpec:
        """Return the division over ``num_ranks`` ranks by the strategy of that name.

        In a product such as "guidance2xulysses", a factor without a number takes the remaining ranks. "guidance"
        alone is for two branches, the most frequent number.
        """
        degrees = _parse("ulysses2xring2" if strategy == "hybrid" else strategy)
        if num_ranks == 1:
            return cls()
        if strategy == "hybrid":
            return cls(ulysses=num_ranks) if num_ranks < 4 or num_ranks % 2 else cls(ring=2, ulysses=num_ranks // 2)
        if strategy == "guidance":
            return cls(guidance=2, ulysses=_share(num_ranks, 2, strategy))
        open_axes = [axis for axis, degree in degrees.items() if not degree]
        if len(open_axes) > 1:
            raise ValueError(f"{strategy!r}: give a number to all factors but one, for instance {strategy}{num_ranks}")
        fixed = math.prod(degree for degree in degrees.values() if degree)
        for axis in open_axes:
            degrees[axis] = _share(num_ranks, fixed, strategy)
        spec = cls(**degrees)
        return spec if open_axes else spec.narrowed(num_ranks)

    @property
    def num_ranks(self) -> int:
        return math.prod(self.degree(axis) for axis in AXES)

    @property
    def context(self) -> int:
        """The number of ranks over which the tokens are split."""
        return self.ring * self.allgather_kv * self.ulysses

    @property
    def divides_weights(self) -> bool:
        """True if each rank needs only a part of the weights."""
        return self.tensor > 1 or self.pipeline > 1

    @property
    def name(self) -> str:
        factors = [f"{axis}{self.degree(axis)}" for axis in AXES if self.degree(axis) > 1]
        return "x".join(factors) or "single"

    def degree(self, axis: str) -> int:
        return int(getattr(self, axis))

    def narrowed(self, num_ranks: int) -> ParallelSpec:
        """Return the same strategies over fewer ranks; tensor and ulysses are kept before ring and guidance."""
        left, degrees = num_ranks, dict.fromkeys(AXES, 1)
        for axis in _KEEP_FIRST:
            degrees[axis] = math.gcd(self.degree(axis), left)
            left //= degrees[axis]
        if left > 1:
            raise ValueError(
                f"{self.name} divides a step over {self.num_ranks} ranks; it cannot be spread over {num_ranks}"
            )
        return ParallelSpec(**degrees)

    def for_branches(self, num_branches: int, *, keep_weights: bool = False) -> ParallelSpec:
        """Return the division for at most ``num_branches`` branches.

        Unused guidance ranks go to the parts' strategy (ulysses if none), without changing weights if ``keep_weights``.
        """
        axes = [axis for axis in _SPREAD_FIRST if not (keep_weights and axis == "tensor")]
        axis = next((axis for axis in axes if self.degree(axis) > 1), "ulysses")
        fitting = range(min(num_branches, self.guidance), 0, -1)
        guidance = next(degree for degree in fitting if self.guidance % degree == 0)
        return replace(self, guidance=guidance, **{axis: self.degree(axis) * (self.guidance // guidance)})

    def by_branches(self, *, keep_weights: bool = False) -> tuple[ParallelSpec, ...]:
        """Return the divisions for one branch, two, and so on, up to this one's guidance degree (two at least)."""
        numbers = range(1, max(self.guidance, 2) + 1)
        return tuple(self.for_branches(number, keep_weights=keep_weights) for number in numbers)

    def check(
        self,
        *,
        num_heads: int,
        has_tensor_plan: bool = True,
        num_blocks: int = 10**6,
        features: Mapping[str, int] | None = None,
    ) -> None:
        """Raise ``ValueError``, with the numbers, if a model cannot be divided like this.

        ``num_blocks`` is how many blocks a pipeline can be cut into (0: its shard plan names no carried tensors).
        ``features`` are the counts that a tensor axis divides, by layer (``engines.parallel.tensor.split_features``).
        """
        if self.pipeline > max(num_blocks, 1):
            raise ValueError(f"pipeline {self.pipeline} does not fit: the model can be cut into {num_blocks} blocks")
        if self.tensor > 1 and not has_tensor_plan:
            raise ValueError(f"{self.name}: this model's shard plan names no linears, so tensor must be 1")
        common = math.gcd(num_heads, *(features or {}).values())
        for name, number in {"heads": num_heads, **(features or {})}.items():
            what = f"{number} heads" if name == "heads" else f"{number} features of {name}"
            _check_divides("tensor", self.tensor, number, what, common)
        heads = num_heads // self.tensor
        what = (
            f"{num_heads} heads" if self.tensor == 1 else f"{heads} heads per tensor rank ({num_heads} / {self.tensor})"
        )
        if self.ulysses > heads:
            raise ValueError(
                f"ulysses {self.ulysses} does not fit: {what}, and every rank needs one; allowed: 1 to {heads}"
            )


def aligned_runs(num_ranks: int, team_size: int) -> list[tuple[int, ...]]:
    """Return teams of ``team_size`` consecutive ranks, each starting at a multiple of it."""
    return [tuple(range(start, start + team_size)) for start in range(0, num_ranks - team_size + 1, team_size)]


def tiling_sizes(num_ranks: int) -> tuple[int, ...]:
    """Return the team sizes that a gang can form: the divisors of its size, so teams of one size fill it."""
    return tuple(team_size for team_size in range(1, num_ranks + 1) if num_ranks % team_size == 0)


def _parse(strategy: str) -> dict[str, int]:
    """Return degrees by axis; 0 for a factor without a number."""
    degrees: dict[str, int] = {}
    for factor in strategy.split("x"):
        match = _FACTOR.fullmatch(factor)
        if match is None or match[1] not in AXES or match[1] in degrees:
            known = ", ".join(STRATEGIES)
            raise ValueError(
                f"unknown strategy {strategy!r}; known: {known}, and products such as 'guidance2xulysses2'"
            )
        degrees[match[1]] = int(match[2] or 0)
    return degrees


def _share(num_ranks: int, fixed: int, strategy: str) -> int:
    if num_ranks % fixed:
        raise ValueError(f"{strategy!r} needs a multiple of {fixed} ranks, not {num_ranks}")
    return num_ranks // fixed


def _check_divides(axis: str, degree: int, number: int, what: str, common: int) -> None:
    """Raise ValueError unless ``degree`` divides ``number``; the divisors of ``common`` are allowed."""
    if number % degree:
        allowed = ", ".join(str(n) for n in range(1, common + 1) if common % n == 0)
        raise ValueError(f"{axis} {degree} does not fit: {what}, not divisible by {degree}; allowed: {allowed}")


Scheme = Literal["int8", "fp8"]
"""Symmetric int8, or float8 e4m3 (arXiv:2209.05433)."""

PRECISIONS = ("auto", "native", "fp8", "fp8-static", "int8", "int8-static")
"""``native`` (and "auto") computes in the model's dtype. The others quantise weights by row.

Activations have a scale per row or, if "static", a fixed scale from a calibration."""

Attention = Literal["auto", "fp8"]
ATTENTIONS = get_args(Attention)
"""Precisions of attention's two products. ``auto``: the model's dtype. ``fp8``: float8 e4m3, of smoothed keys."""

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


def check_attention_choice(attention: str) -> None:
    """Raise ValueError for an unknown precision of attention."""
    if attention not in ATTENTIONS:
        raise ValueError(f"attention is {attention!r}; it must be {' or '.join(ATTENTIONS)}")
