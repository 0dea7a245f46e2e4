"""Weights whose additions change from job to job, in place: captured graphs and views of weights stay valid."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from engines.additions.weights import added, part_of, whole_parameter
from engines.core.additions import Addition, LowRank, Mix, normal_mix


@dataclass(frozen=True, kw_only=True, slots=True)
class _Weight:
    """A parameter that some addition touches; ``base`` is what it was loaded as, ``ones`` are by addition."""

    parameter: nn.Parameter
    base: Tensor
    ones: Mapping[str, LowRank]

    def write(self, mix: Mix) -> None:
        amounts = [(amount, self.ones[name]) for name, amount in mix if name in self.ones]
        self.parameter.copy_(added(self.base, amounts) if amounts else self.base)


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

    def hold(self, name: str, share: Hashable, module: nn.Module, slices: Mapping[str, Any]) -> None:
        """Keeps the weights of ``module``, one of the shares of the module ``name``, which has no additions now.

        ``slices`` say which parts of the whole module's parameters its own are.
        """
        self._shares.setdefault(name, {})[share] = _Share(self._weights(name, module, slices))

    @torch.no_grad()
    def set(self, name: str, share: Hashable, mix: Mix) -> None:
        """Makes the weights of a share those with ``mix`` added. ValueError for names that are not known."""
        mix, shares = normal_mix(mix), self._shares[name]
        if unknown := [one for one, _ in mix if one not in self._additions]:
            known = ", ".join(self._additions) or "none"
            raise ValueError(f"nothing is known of {', '.join(unknown)} to add to the weights; known: {known}")
        if shares[share].mix == mix:
            return
        shares[share].write(mix)
        for key, other in shares.items():
            # They may be views of what was written, and a part's sums be rounded otherwise; the base is one in all.
            if key != share and not (mix == () == other.mix):
                other.mix = None

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

    def _weights(self, name: str, module: nn.Module, slices: Mapping[str, Any]) -> Iterable[_Weight]:
        modules = {key: addition.get(name, {}) for key, addition in self._additions.items()}
        for own, parameter in module.named_parameters():
            whole = whole_parameter(slices, own)
            ones = {key: part_of(ranks[whole], slices, own) for key, ranks in modules.items() if whole in ranks}
            if ones and not parameter.is_meta:
                base = parameter.detach().clone(memory_format=torch.contiguous_format)
                yield _Weight(parameter=parameter, base=base, ones={k: _at(x, base.device) for k, x in ones.items()})


def _at(one: LowRank, device: torch.device) -> LowRank:
    return LowRank(up_NR=one.up_NR.to(device), down_RK=one.down_RK.to(device), scale=one.scale)
