"""What a job's steps share, computed at its first step and kept: modulation of all steps, text, rotary tables."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from engines.core.fast_model import FastWeights
from engines.core.model import Branch, ModelInputs
from engines.torch_engine.fast_step import LATENTS, FastStep

AheadOfModule = Callable[[nn.Module, ModelInputs], ModelInputs]

TIMESTEP = "timestep"
"""The input that a schedule gives for all steps at once."""

MAX_KEPT, MAX_KEPT_BYTES = 32, 2**31
"""Of all results together. One that is needed again after it went is made again, at the price of a step's share."""


@dataclass(frozen=True, slots=True)
class _Kept:
    """A result, and the tensors it came from: while they are held, nothing else can have their identity."""

    sources: tuple[Tensor, ...]
    result: Mapping[str, Tensor]

    @property
    def num_bytes(self) -> int:
        return sum(x.nbytes for x in (*self.sources, *self.result.values()))


class AheadCache:
    """Results by the identity of the tensors they came from. States of jobs hold the same tensors from step to step."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Hashable, _Kept] = OrderedDict()

    def of_module(self, branch: Branch, module: nn.Module, ahead: AheadOfModule) -> ModelInputs:
        """What a module's step may be given beside its inputs."""
        return self._get(module, tuple(_lasting(branch).values()), lambda: ahead(module, branch.inputs))

    def tensors(self, branch: Branch, weights: FastWeights, fast: FastStep) -> dict[str, Tensor]:
        """Everything that this step of ``fast`` reads besides the latents."""
        shared = _lasting(branch)
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
            self._let_go()
        self._kept.move_to_end(key)
        return self._kept[key].result

    def _let_go(self) -> None:
        """Of what was not asked for the longest; the newest stays."""
        while len(self._kept) > MAX_KEPT or (len(self._kept) > 1 and self._num_bytes() > MAX_KEPT_BYTES):
            self._kept.popitem(last=False)

    def _num_bytes(self) -> int:
        return sum(kept.num_bytes for kept in self._kept.values())


def _lasting(branch: Branch) -> dict[str, Tensor]:
    """The inputs that are the same tensors in all steps of a job."""
    return {name: x for name, x in branch.inputs.items() if name not in (LATENTS, TIMESTEP)}
