"""Cache of tensors shared by a job's steps, computed at its first step: modulation, text, rotary tables.

Jobs may take turns on a team at every step. A cache keeps what all of them need, as far as a share of the memory goes;
the planner counts that for two jobs (``StepCost.memory_bytes``).
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from engines.core.model import LATENTS, MIN_HOISTED_BYTES, TIMESTEP, Arguments, Branch, FastWeights, ModelInputs
from engines.core.torch_private import version_of
from engines.torch_engine.fast_step import FastStep

HoistInputs = Callable[[nn.Module, Arguments], ModelInputs]

MAX_ENTRIES = 32
"""Most results in a cache. An evicted one is computed again within one step."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """A result and its source tensors, which only jobs hold: another tensor may get the identity of one that went."""

    sources: tuple[weakref.ref[Tensor], ...]
    result: Mapping[str, Tensor]

    @property
    def num_bytes(self) -> int:
        return sum(x.nbytes for x in self.result.values())

    @property
    def is_in_use(self) -> bool:
        return all(source() is not None for source in self.sources)

    def is_of(self, sources: tuple[Tensor, ...]) -> bool:
        return all(own() is source for own, source in zip(self.sources, sources, strict=True))


class HoistedCache:
    """Results by the identity of their source tensors. States of jobs hold the same tensors from step to step.

    Results of ended jobs go before a new one is computed. Above ``max_bytes`` the least recently used go, but not the
    last ``min_entries``, which a job alternates between.

    ``latents`` and ``timestep`` are the names of the inputs that change with every step. ``hoisted_inputs`` as in
    ``DenoiserModel``.
    """

    def __init__(
        self,
        *,
        latents: str = LATENTS,
        timestep: str = TIMESTEP,
        hoisted_inputs: tuple[str, ...] = (),
        min_entries: int = 2,
        max_bytes: int = MIN_HOISTED_BYTES,
    ) -> None:
        self._latents, self._timestep, self._hoisted_inputs = latents, timestep, hoisted_inputs
        self._min_entries, self._max_bytes = min_entries, max_bytes
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
        entry = self._entries.get(key)
        if entry is None or not entry.is_of(sources):
            del entry  # before the new one takes memory
            self._evict(self._min_entries - 1)
            entry = self._entries[key] = _Entry(tuple(map(weakref.ref, sources)), make())
            self._evict(self._min_entries)
        self._entries.move_to_end(key)
        return entry.result

    def _evict(self, min_entries: int) -> None:
        """Drop entries of ended jobs; then, above a limit, the oldest in use but the last ``min_entries``."""
        for key in [key for key, entry in self._entries.items() if not entry.is_in_use]:
            del self._entries[key]
        while len(self._entries) > min_entries and (
            len(self._entries) > MAX_ENTRIES or self._num_bytes() > self._max_bytes
        ):
            self._entries.popitem(last=False)

    def _num_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self._entries.values())

    def _constant_inputs(self, branch: Branch) -> dict[str, Tensor]:
        """Return the inputs that are the same tensors in all steps of a job."""
        return {name: x for name, x in branch.inputs.items() if name not in (self._latents, self._timestep)}
