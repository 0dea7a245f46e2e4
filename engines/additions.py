"""Weights plus low-rank products: computed in float32, rounded once, changed in place from job to job.

Weights whose additions change from job to job, in place: captured graphs and views of weights stay valid.

Where layers have them quantised, they are quantised anew, as if they had been loaded with what is added.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from engines.core.model import Addition, LowRank, LowRanks, Mix, WeightSource, Writers, WriteWeight, normal_mix

Amounts: TypeAlias = Iterable[tuple[float, LowRank]]
"""Low-rank products of one weight, each with its amount."""
HALVES = (torch.bfloat16, torch.float16)


def added(base: Tensor, amounts: Amounts) -> Tensor:
    """Return ``base`` plus the products, float32, in its shape."""
    sum_NK = base.reshape(base.shape[0], -1)
    for amount, one in amounts:
        sum_NK = torch.add(sum_NK, _product(one, base.device), alpha=amount * one.scale)
    return sum_NK.float().view(base.shape)


def _product(one: LowRank, device: torch.device) -> Tensor:
    """Return ``up @ down``, float32. GPUs need no widening: products of two bfloat16 are exact in float32."""
    up_NR, down_RK = one.up_NR.to(device), one.down_RK.to(device)
    if device.type == "cuda" and up_NR.dtype == down_RK.dtype and up_NR.dtype in HALVES:
        return torch.mm(up_NR, down_RK, out_dtype=torch.float32)
    return up_NR.float() @ down_RK.float()


def part_of(one: LowRank, slices: Mapping[str, Any], name: str) -> LowRank:
    """Return the product for a rank's share of a parameter. ``slices`` are those of ``parallel.weight_files``."""
    place = slices.get(name)
    if place is None or not place.ranges:
        return one
    up_NR, down_RK = one.up_NR, one.down_RK
    if place.dim == 0:
        up_NR = torch.cat([up_NR[start:stop] for start, stop in place.ranges])
    else:
        down_RK = torch.cat([down_RK[:, start:stop] for start, stop in place.ranges], dim=1)
    return LowRank(up_NR=up_NR, down_RK=down_RK, scale=one.scale)


def whole_parameter(slices: Mapping[str, Any], name: str) -> str:
    """Return the name of a parameter, or of the one that it is a share of, in the whole module."""
    return str(slices[name].name) if name in slices else name


@torch.no_grad()
def merge(module: nn.Module, amounts: Iterable[tuple[float, LowRanks]], slices: Mapping[str, Any]) -> None:
    """Add to the weights of ``module``, whole or a rank's share, for good; absent parameters are skipped."""
    every = tuple(amounts)
    for name, parameter in module.named_parameters():
        whole = whole_parameter(slices, name)
        mine = [(amount, part_of(ones[whole], slices, name)) for amount, ones in every if amount and whole in ones]
        if mine and not parameter.is_meta:
            parameter.copy_(added(parameter, mine))


@dataclass(frozen=True, kw_only=True, slots=True)
class MergingSource:
    """A ``WeightSource`` that adds ``additions``, each with its amount, to the weights that ``source`` reads."""

    source: WeightSource
    additions: tuple[tuple[float, Addition], ...]

    @property
    def device(self) -> torch.device:
        return self.source.device

    def fill(
        self, name: str, module: nn.Module, slices: Mapping[str, Any], leave_out: Collection[nn.Module] = ()
    ) -> None:
        self.source.fill(name, module, slices, leave_out)
        merge(module, ((amount, addition.get(name, {})) for amount, addition in self.additions), slices)


NOBODY: Writers = MappingProxyType({})


@dataclass(frozen=True, kw_only=True, slots=True)
class _Weight:
    """A parameter that some addition touches; ``base`` is what it was loaded as, ``ones`` are by addition.

    ``writers`` take its new values, float32 where something is added.
    """

    base: Tensor
    writers: tuple[WriteWeight, ...]
    ones: Mapping[str, LowRank]

    def write(self, mix: Mix) -> None:
        amounts = [(amount, self.ones[name]) for name, amount in mix if name in self.ones]
        value = added(self.base, amounts) if amounts else self.base
        for write in self.writers:
            write(value)


class _Share:
    """A module's weights, or a rank's share of them. ``mix`` is what is added now; None: parts of several."""

    def __init__(self, weights: Iterable[_Weight]) -> None:
        self._weights = tuple(weights)
        self.mix: Mix | None = ()

    def write(self, mix: Mix) -> None:
        touched = None if self.mix is None else {name for name, _ in (*self.mix, *mix)}
        self.mix = None  # should one of them fail
        for weight in self._weights:
            if touched is None or not touched.isdisjoint(weight.ones):
                weight.write(mix)
        self.mix = mix


class WeightSwitch:
    """Gives the modules of a model the additions that a branch asks for, by name.

    The values of all weights that some addition touches are kept as they were loaded, and each change begins with
    them: what ran before leaves no trace. Shares of one module may be views of the same memory.
    """

    def __init__(self, additions: Mapping[str, Addition]) -> None:
        self._additions = additions
        self._shares: dict[str, dict[Hashable, _Share]] = {}

    def hold(
        self,
        name: str,
        share: Hashable,
        module: nn.Module,
        slices: Mapping[str, Any],
        *,
        loaded: Mapping[str, nn.Parameter],
        writers: Writers = NOBODY,
    ) -> None:
        """Keeps the weights of ``module``, one of the shares of the module ``name``, which has no additions now.

        ``slices`` say which parts of the whole module's parameters its own are. ``loaded`` are these, by name, as they
        were before layers were replaced: those that are gone went to the ``write_weight`` of the layer that is there.
        Of parameters in ``writers``, all that counts is what these hold.
        """
        weights = (
            _weight(parameter, ones, writers.get(parameter) or _of_layer(module, own, parameter))
            for own, parameter in loaded.items()
            if not parameter.is_meta and (ones := self._ones(name, own, slices))
        )
        self._shares.setdefault(name, {})[share] = _Share(weights)

    @torch.no_grad()
    def set(self, name: str, share: Hashable, mix: Mix) -> None:
        """Makes the weights of a share those with ``mix`` added. ValueError for names that are not known."""
        mix, shares = normal_mix(mix), self._shares[name]
        if unknown := [one for one, _ in mix if one not in self._additions]:
            known = ", ".join(self._additions) or "none"
            raise ValueError(f"nothing is known of {', '.join(unknown)} to add to the weights; known: {known}")
        if shares[share].mix == mix:
            return
        for key, other in shares.items():  # before it is written, which may end halfway
            # They may be views of what is written, and a part's sums be rounded otherwise; the base is one in all.
            if key != share and not (mix == () == other.mix):
                other.mix = None
        shares[share].write(mix)

    @torch.no_grad()
    def reset(self, name: str) -> None:
        """Makes all shares of a module what they were loaded as."""
        for share in self._shares.get(name, {}).values():
            if share.mix != ():
                share.write(())

    def clear(self) -> None:
        """Lets go of everything; all modules are as they were loaded."""
        for name in self._shares:
            self.reset(name)
        self._shares.clear()

    def _ones(self, name: str, own: str, slices: Mapping[str, Any]) -> dict[str, LowRank]:
        """What the parameter ``own`` of a share may have added, by addition."""
        whole = whole_parameter(slices, own)
        modules = {key: addition.get(name, {}) for key, addition in self._additions.items()}
        return {key: part_of(ranks[whole], slices, own) for key, ranks in modules.items() if whole in ranks}


def _weight(parameter: nn.Parameter, ones: Mapping[str, LowRank], writers: tuple[WriteWeight, ...]) -> _Weight:
    """Without ``writers`` the parameter itself is written to, and its values are kept; else it keeps them itself.

    What is quantised is rounded first, as weights are that were merged when they were loaded.
    """
    here = {key: _at(one, parameter.device) for key, one in ones.items()}
    if writers:
        return _Weight(base=parameter.detach(), writers=writers, ones=here)
    base = parameter.detach().clone(memory_format=torch.contiguous_format)
    return _Weight(base=base, writers=(parameter.copy_,), ones=here)


def _of_layer(module: nn.Module, name: str, parameter: nn.Parameter) -> tuple[WriteWeight, ...]:
    """The layer that has the parameter in another form; none if it is one of ``module`` still."""
    owner, _, leaf = name.rpartition(".")
    layer: Any = module.get_submodule(owner)
    return () if getattr(layer, leaf, None) is parameter else (layer.write_weight,)


def _at(one: LowRank, device: torch.device) -> LowRank:
    return LowRank(up_NR=one.up_NR.to(device), down_RK=one.down_RK.to(device), scale=one.scale)
