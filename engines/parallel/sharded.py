"""A family's model, run by any team of a gang: the team's weights, hooks and kernels, chosen per forward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from engines.additions import WeightSwitch, changed_parameters
from engines.core.attention import Kernel
from engines.core.layout import TokenLayout
from engines.core.model import Branch, DenoiserModel, FastWeights, dtype_of
from engines.core.resources import rank_resources
from engines.core.shard_plan import ShardPlan, named_like
from engines.core.weight_memory import WeightMemory
from engines.parallel.collectives import Axis
from engines.parallel.copies import weight_sharing_copy
from engines.parallel.key_rows import forward_over, rows_at_run_time
from engines.parallel.local_attention import local_kernel
from engines.parallel.mesh import Team
from engines.parallel.offload import BlockOffload, offloaded_blocks, offloaded_weights
from engines.parallel.pipeline import Stage, block_weights, other_stages
from engines.parallel.strategies import MakeKernel, team_kernel, whole_queries
from engines.parallel.tensor import split_weights
from engines.parallel.token_hooks import TokenHooks
from engines.parallel.weight_files import slices_of
from engines.quantization.linear import move_from_host, weights_to_quantise

PrepareModule = Callable[[str, nn.Module, ShardPlan], None]
"""Called once per module that will run: with its name, the module (or a copy with its share of weights), and its plan.

It compiles blocks, or replaces layers by faster equivalents."""


class KernelsInModules(WeakKeyDictionary[nn.Module, Kernel]):
    """Current kernel of each module, since setting one walks all submodules. Engines may share a module."""


_Key = tuple[str | Axis | None, ...]
FAST: _Key = ("fast",)
"""Key of teams whose weights are arranged for hand-ordered steps."""


_TEAM_KERNEL: MakeKernel = partial(team_kernel, crop=rows_at_run_time)
_WHOLE_QUERIES: MakeKernel = partial(whole_queries, crop=rows_at_run_time)


@dataclass(frozen=True, slots=True)
class _Share:
    module: nn.Module
    stage: Stage | None


class ShardedModel:
    """Runs one branch at a time over the tokens and weights of a team. Every rank of the team makes the same call.

    Teams that split only tokens share the module. Tensor and pipeline axes get copies at first use, which share tensors
    where they can. With weights in files, each copy reads its own share.
    """

    def __init__(
        self,
        model: DenoiserModel,
        on_new_module: PrepareModule | None = None,
        *,
        make_kernel: MakeKernel = _TEAM_KERNEL,
        quantises: bool = False,
        attention: str = "auto",
        num_offloaded: int = 0,
        originals_on_host: bool = False,
    ) -> None:
        """Prepare ``model``. ``quantises``: weights are read to the host, and ``on_new_module`` quantises large layers.

        ``num_offloaded`` blocks of each module stay on the host (``BlockOffload``). Teams divide no weights then.
        ``originals_on_host``: loaded values of weights that additions change stay there too.
        """
        self._model = model
        self._hooks = {name: TokenHooks(module, model.plan) for name, module in model.modules.items()}
        # Counted now: layers of the module may be swapped later, on some ranks before others.
        self._weights = {name: block_weights(module, model.plan) for name, module in model.modules.items()}
        self._shares: dict[_Key, _Share] = {}
        self._num_offloaded, self._offloads = num_offloaded, list[BlockOffload]()
        self._originals_on_host = originals_on_host
        device = model.device if num_offloaded or originals_on_host else None
        self._switch = WeightSwitch(
            model.additions, grows=model.additions_change, device=device, on_host=originals_on_host
        )
        self._memory = rank_resources().get(WeightMemory)
        self._memory.before_sleep(self._switch.reset_all)
        self._fast_modules: set[str] = set()
        self._changed_layers: list[tuple[nn.Module, str, nn.Module]] = []
        """Modules, and the names and layers in them whose weights additions change."""
        self._on_new_module, self._quantises = on_new_module, quantises
        self._make_kernel, self._attention = make_kernel, attention
        self._kernel_of = lru_cache(maxsize=256)(self._made_kernel)

    def use(self, make_kernel: MakeKernel) -> None:
        """Use kernels made by ``make_kernel`` from the next forward on."""
        self._make_kernel = make_kernel

    def close(self) -> None:
        """Restore the model: no hooks, the local kernel, and the layers that a next engine needs for additions."""
        for offload in self._offloads:
            self._memory.forget(offload.forget_copies)
            offload.close()
        self._offloads.clear()
        self._switch.clear()
        self._memory.forget(self._switch.reset_all)
        kernels, local = rank_resources().get(KernelsInModules), self._local_kernel()
        for name, module in self._model.modules.items():
            self._hooks[name].remove()
            self._model.set_kernel(module, local)
            kernels[module] = local
        for module, own, layer in self._changed_layers:
            module.set_submodule(own, layer)
        self._changed_layers.clear()
        self._shares.clear()
        self._fast_modules.clear()

    def module(self, name: str, team: Team) -> nn.Module:
        """Return the named module with a team's share of weights and blocks, made at first use."""
        return self._share(name, team).module

    def forward(self, branch: Branch, team: Team) -> Tensor:
        """Return the whole prediction, equal on the context and tensor axes; ``finish`` adds the pipeline axis."""
        module = self.module(branch.module, team)
        layout = self.layout(branch, team)
        self._set_kernel(module, team, layout, branch.attention or self._attention)
        with forward_over(layout), self._hooks[branch.module].over(layout, team.context):
            return self._model.forward(module, branch.arguments)

    def set_additions(self, branch: Branch, team: Team, fast: FastWeights | None = None) -> None:
        """Apply the additions of ``branch`` to the team's weights, before its forward or its replay.

        Teams that use the ``fast`` weights share them.
        """
        if not (self._model.switches or branch.additions):
            return
        if fast is None:
            self._share(branch.module, team)
        elif branch.module not in self._fast_modules:
            self._hold_fast(branch.module, fast)
        key = _key(branch.module, team) if fast is None else FAST
        if self._switch.is_behind(branch.additions):
            self._switch.reset_before(branch.additions)  # its temporary tensors are no weights
            with self._memory.region():
                self._switch.catch_up(branch.additions)
        self._switch.set(branch.module, key, branch.additions)

    def finish(self, prediction: Tensor, branch: Branch, team: Team) -> Tensor:
        """Make a prediction equal on the pipeline axis, once all overlapping forwards were started."""
        stage = self._share(branch.module, team).stage
        return prediction if stage is None else stage.finish(prediction)

    def layout(self, branch: Branch, team: Team) -> TokenLayout:
        return TokenLayout.of(self._model.plan.streams, self._model.stream_lengths(branch.arguments), team.context.size)

    def _share(self, name: str, team: Team) -> _Share:
        key = _key(name, team)
        if key not in self._shares:
            with self._memory.region():
                self._shares[key] = self._make_share(name, team)
        return self._shares[key]

    def _make_share(self, name: str, team: Team) -> _Share:
        if name not in self._model.modules:
            raise ValueError(f"the model has no module {name!r}; it has {', '.join(self._model.modules)}")
        whole, plan, weights = self._model.modules[name], self._model.plan, self._model.weights
        self._switch.reset(name)  # a share is split from the weights as loaded
        module = whole
        slices = slices_of(whole, plan, team.tensor) if team.tensor.size > 1 else {}
        if team.tensor.size > 1:
            module = split_weights(whole, plan, team.tensor)  # a copy that keeps the hooks
        elif team.pipeline.size > 1 or weights is not None:
            module = weight_sharing_copy(whole)
        if weights is not None:
            left_out = other_stages(module, plan, team, self._weights[name])
            on_host = weights_to_quantise(module, plan) if self._quantises else ()
            weights.fill(name, module, slices, leave_out=left_out, on_host=on_host)
        changed = {*changed_parameters(module, self._model, name, slices)}
        loaded = {own: parameter for own, parameter in module.named_parameters() if parameter in changed}
        stay = offloaded_weights(module, plan, self._num_offloaded) if self._num_offloaded else frozenset[str]()
        if self._originals_on_host and self._quantises:
            stay |= weights_to_quantise(module, plan)
        move_from_host((each for own, each in loaded.items() if own not in stay), self._model.device)
        if module is whole:
            linears = ((own, layer) for own, layer in whole.named_modules() if isinstance(layer, nn.Linear))
            self._changed_layers += [(whole, own, layer) for own, layer in linears if layer.weight in changed]
        if self._on_new_module is not None:
            self._on_new_module(name, module, plan)
        if self._num_offloaded:
            blocks = offloaded_blocks(module, plan, self._num_offloaded)
            self._offloads.append(offload := BlockOffload(blocks, self._model.device))
            self._memory.before_sleep(offload.forget_copies)
        self._memory.hold(module)  # before its tensors have aliases
        if self._model.switches:
            self._switch.hold(name, _key(name, team), module, slices, loaded=loaded)
        return _Share(module, Stage(module, plan, team, self._weights[name]) if team.pipeline.size > 1 else None)

    def _hold_fast(self, name: str, fast: FastWeights) -> None:
        self._switch.reset(name)
        module = self._model.modules[name]
        loaded = dict(module.named_parameters())
        with self._memory.region():
            self._switch.hold(name, FAST, module, {}, loaded=loaded, writers=fast.writers())
        self._fast_modules.add(name)

    def _set_kernel(self, module: nn.Module, team: Team, layout: TokenLayout, attention: str) -> None:
        kernels, kernel = rank_resources().get(KernelsInModules), self._kernel(team, layout, attention)
        if kernels.get(module) is kernel:
            return
        self._model.set_kernel(module, kernel)
        for name, stream in self._model.plan.alone:
            self._model.set_kernel(module.get_submodule(name), self._kernel(team, layout.of_stream(stream), attention))
        for pattern in self._model.plan.whole_queries:
            whole: Kernel = self._kernel_of(_WHOLE_QUERIES, attention, team, layout)
            for inner in named_like(module, pattern):
                self._model.set_kernel(inner, whole)
        kernels[module] = kernel

    def _kernel(self, team: Team, layout: TokenLayout, attention: str) -> Kernel:
        kernel: Kernel = self._kernel_of(self._make_kernel, attention, team, layout)
        return kernel

    def _made_kernel(self, make: MakeKernel, attention: str, team: Team, layout: TokenLayout) -> Kernel:
        if self._model.plan.reads_lse:
            make = partial(team_kernel, keeps_lse=True, crop=rows_at_run_time)
        return make(self._local_kernel(attention), team, layout)

    def _local_kernel(self, attention: str = "auto") -> Kernel:
        module = next(iter(self._model.modules.values()))
        return local_kernel(self._model.device, dtype_of(module), attention)


def _key(name: str, team: Team) -> _Key:
    return (name, *(axis if axis.size > 1 else None for axis in (team.tensor, team.pipeline)))
