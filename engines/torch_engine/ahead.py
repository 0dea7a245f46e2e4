"""What a job's steps share, computed at its first step and kept: modulation of all steps, text, rotary tables."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass

from torch import Tensor

from engines.model import Branch
from engines.torch_engine.fast_model import FastWeights
from engines.torch_engine.fast_step import LATENTS, FastStep

TIMESTEP = "timestep"
"""The input that a schedule gives for all steps at once."""

MAX_KEPT = 16
"""Of each kind; about 60 MB a job at most (28 steps of a model with a million modulation values)."""


@dataclass(frozen=True, slots=True)
class _Kept:
    """A result, and the tensors it came from: while they are held, nothing else can have their identity."""

    sources: tuple[Tensor, ...]
    result: Mapping[str, Tensor]


class AheadCache:
    """Results by the identity of the tensors they came from. States of jobs hold the same tensors from step to step."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Hashable, _Kept] = OrderedDict()

    def tensors(self, branch: Branch, weights: FastWeights, fast: FastStep) -> dict[str, Tensor]:
        """Everything that this step of ``fast`` reads besides the latents."""
        shared = {name: x for name, x in branch.inputs.items() if name not in (LATENTS, TIMESTEP)}
        fixed = self._get(fast, tuple(shared.values()), lambda: fast.ahead(branch.inputs))
        if branch.schedule is None:
            now = weights.scheduled(branch.inputs, branch.inputs[TIMESTEP][None])
            return {**fixed, **{name: stacked[0] for name, stacked in now.items()}}
        timesteps_S, step = branch.schedule.timesteps_S, branch.schedule.step
        sources = (timesteps_S, *shared.values())
        scheduled = self._get(weights, sources, lambda: weights.scheduled(branch.inputs, timesteps_S[:, None]))
        return {**fixed, **{name: stacked[step] for name, stacked in scheduled.items()}}

    def clear(self) -> None:
        self._kept.clear()

    def _get(
        self, owner: object, sources: tuple[Tensor, ...], make: Callable[[], Mapping[str, Tensor]]
    ) -> Mapping[str, Tensor]:
        key = (id(owner), *((id(tensor), tensor._version) for tensor in sources))
        if key not in self._kept:
            self._kept[key] = _Kept(sources, make())
            if len(self._kept) > 2 * MAX_KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return self._kept[key].result
