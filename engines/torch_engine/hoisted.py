"""Cache of tensors shared by a job's steps, computed at its first step: modulation, text, rotary tables."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from engines.core.model import LATENTS, TIMESTEP, Arguments, Branch, FastWeights, ModelInputs
from engines.core.torch_private import version_of
from engines.torch_engine.fast_step import FastStep

HoistInputs = Callable[[nn.Module, Arguments], ModelInputs]

MAX_ENTRIES, MAX_BYTES = 32, 2**31
"""Limits of a cache. An evicted entry is computed again within one step."""
MIN_ENTRIES = 2
"""Entries kept whatever their size: two branches of a step alternate. One is kept if branches share it."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """A result and its source tensors, held so that no other tensor can get their identity."""

    sources: tuple[Tensor, ...]
    result: Mapping[str, Tensor]

    @property
    def num_bytes(self) -> int:
        return sum(x.nbytes for x in (*self.sources, *self.result.values()))


class HoistedCache:
    """Results by the identity of their source tensors. States of jobs hold the same tensors from step to step.

    ``latents`` and ``timestep`` are the names of the inputs that change with every step. ``hoisted_inputs`` as in
    ``DenoiserModel``.
    """

    def __init__(
        self, *, latents: str = LATENTS, timestep: str = TIMESTEP, hoisted_inputs: tuple[str, ...] = ()
    ) -> None:
        self._latents, self._timestep, self._hoisted_inputs = latents, timestep, hoisted_inputs
        self._min_entries = 1 if hoisted_inputs else MIN_ENTRIES
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()

    def module_inputs(self, branch: Branch, module: nn.Module, hoist: HoistInputs) -> ModelInputs:
        """Return the module's extra inputs beside the branch's: ``hoist(module, arguments)``."""
        sources, constants = self._constant_inputs(branch), sorted(branch.constants.items())
        if self._hoisted_inputs:
            sources, constants = {name: x for name, x in sources.items() if name in self._hoisted_inputs}, []
        owner = (id(module), branch.additions, repr(constants))
        return self._get(owner, tuple(sources.values()), lambda: hoist(module, branch.arguments))

    def step_tensors(self, branch: Branch, weights: FastWeights, fast: FastStep) -> dict[str, Tensor]:
        """Return everything that this step of ``fast`` reads besides the latents."""
        shared = {name: x for name, x in self._constant_inputs(branch).items() if name not in weights.step_inputs}
        fixed = self._get((fast, branch.additions), tuple(shared.values()), lambda: fast.hoisted(branch.arguments))
        if branch.schedule is None:
            now = weights.scheduled(branch.inputs, branch.inputs[self._timestep][None])
            return {**fixed, **{name: stacked[0] for name, stacked in now.items()}}
        timesteps_S, step = branch.schedule.timesteps_S, branch.schedule.step
        sources = (timesteps_S, *shared.values())
        scheduled = self._get(
            (id(weights), branch.additions), sources, lambda: weights.scheduled(branch.inputs, timesteps_S[:, None])
        )
        return {**fixed, **{name: stacked[step] for name, stacked in scheduled.items()}}

    def clear(self) -> None:
        self._entries.clear()

    def _get(
        self, owner: Hashable, sources: tuple[Tensor, ...], make: Callable[[], Mapping[str, Tensor]]
    ) -> Mapping[str, Tensor]:
        """Return the result for ``owner``: a module, or the step itself (its address may be reused), with additions."""
        key = (owner, *((id(tensor), version_of(tensor)) for tensor in sources))
        if key not in self._entries:
            self._evict(self._min_entries - 1)  # before the new one takes memory
            self._entries[key] = _Entry(sources, make())
            self._evict(self._min_entries)
        self._entries.move_to_end(key)
        return self._entries[key].result

    def _evict(self, min_entries: int) -> None:
        """Drop the least recently used entries, but not the last ``min_entries``."""
        while len(self._entries) > MAX_ENTRIES or (len(self._entries) > min_entries and self._num_bytes() > MAX_BYTES):
            self._entries.popitem(last=False)

    def _num_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self._entries.values())

    def _constant_inputs(self, branch: Branch) -> dict[str, Tensor]:
        """Return the inputs that are the same tensors in all steps of a job."""
        return {name: x for name, x in branch.inputs.items() if name not in (self._latents, self._timestep)}
