"""A family's model, run by any team of a gang: weights, hooks and kernels for the team, chosen per forward."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from engines.model import Branch, DenoiserModel
from engines.parallel.collectives import Axis
from engines.parallel.kernel import Kernel
from engines.parallel.layout import TokenLayout
from engines.parallel.local import local_kernel
from engines.parallel.mesh import Team
from engines.parallel.shard_plan import ShardPlan
from engines.parallel.strategy import team_kernel
from engines.parallel.tensor import split_weights
from engines.parallel.token_hooks import TokenHooks

PrepareModule = Callable[[nn.Module, ShardPlan], None]
"""Called once with every module that will run: compiles its blocks, or swaps layers for faster equals."""


_KERNEL_IN: WeakKeyDictionary[nn.Module, Kernel] = WeakKeyDictionary()
"""The kernel that each module has now (setting one walks all submodules); here because engines may share a module."""


class ShardedModel:
    """One branch at a time, over the tokens and weights of a team; every rank of it makes the same call.

    Splitting tokens changes no weight, so teams share the module; a tensor axis has its own, made at first use.
    """

    def __init__(self, model: DenoiserModel, on_new_module: PrepareModule | None = None) -> None:
        self._model = model
        self._hooks = {name: TokenHooks(module, model.plan) for name, module in model.modules.items()}
        self._modules: dict[tuple[str, Axis | None], nn.Module] = {}
        self._on_new_module = on_new_module
        self._kernel = lru_cache(maxsize=256)(self._make_kernel)

    def close(self) -> None:
        """Give the model back as it was: no hooks, the local kernel."""
        for name, module in self._model.modules.items():
            self._hooks[name].remove()
            self._set_kernel(module, self._local())
        self._modules.clear()

    def module(self, name: str, tensor: Axis) -> nn.Module:
        """The module of that name with the weights for a tensor axis, made at first use."""
        key = (name, tensor if tensor.size > 1 else None)
        if key not in self._modules:
            self._modules[key] = self._make_module(name, tensor)
        return self._modules[key]

    def forward(self, branch: Branch, team: Team) -> Tensor:
        """The whole prediction, equal on all ranks of the team's context and tensor axes."""
        module = self.module(branch.module, team.tensor)
        layout = self.layout(branch, team)
        self._set_kernel(module, self._kernel(team, layout))
        with self._hooks[branch.module].over(layout, team.context):
            return self._model.forward(module, branch.inputs)

    def layout(self, branch: Branch, team: Team) -> TokenLayout:
        return TokenLayout.of(self._model.plan.streams, self._model.stream_lengths(branch.inputs), team.context.size)

    def _make_module(self, name: str, tensor: Axis) -> nn.Module:
        if name not in self._model.modules:
            raise ValueError(f"the model has no module {name!r}; it has {', '.join(self._model.modules)}")
        module = self._model.modules[name]
        if tensor.size > 1:
            module = split_weights(module, self._model.plan, tensor)  # a copy, which keeps the hooks
        if self._on_new_module is not None:
            self._on_new_module(module, self._model.plan)
        return module

    def _set_kernel(self, module: nn.Module, kernel: Kernel) -> None:
        if _KERNEL_IN.get(module) is not kernel:
            self._model.set_kernel(module, kernel)
            _KERNEL_IN[module] = kernel

    def _make_kernel(self, team: Team, layout: TokenLayout) -> Kernel:
        return team_kernel(self._local(), team, layout)

    def _local(self) -> Kernel:
        some = next(next(iter(self._model.modules.values())).parameters())
        return local_kernel(some.device, some.dtype)
