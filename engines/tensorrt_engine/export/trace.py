"""Trace of a family's module as one rank of a team runs it, with strategy, hooks and collectives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.nn import functional

from engines.core.attention import Kernel, Prefix
from engines.core.model import Branch, DenoiserModel, ModelInputs
from engines.core.spec import ParallelSpec
from engines.core.torch_private import fake_store
from engines.parallel.copies import weight_sharing_copy
from engines.parallel.local_attention import as_many_as
from engines.parallel.mesh import Groups, Team, Teams
from engines.parallel.strategies import team_kernel
from engines.parallel.tensor import SplitTable, split_weights
from engines.parallel.token_hooks import TokenHooks
from engines.tensorrt_engine.config import RingForm
from engines.tensorrt_engine.export.attention import group_free_kernel, native_ring_kernel
from engines.tensorrt_engine.export.markers import MarkedLayout, cut_features
from engines.tensorrt_engine.export.segments import ATTEND

DynamicDims = Mapping[str, Any]
"""``torch.export``'s ``dynamic_shapes`` per input name."""


ChangeModule = Callable[[nn.Module], nn.Module]


def sdpa(
    q_BLHD: Tensor, k_BMGD: Tensor, v_BMGD: Tensor, /, *, mask_BM: Tensor | None = None, prefix: Prefix | None = None
) -> tuple[Tensor, Tensor]:
    """Compute attention that exports as ONNX's ``Attention``. Its log-sum-exp is empty: no strategy here needs it."""
    assert mask_BM is None
    assert prefix is None
    q_BHLD, k_BHMD, v_BHMD = (x.transpose(1, 2) for x in (q_BLHD, *as_many_as(q_BLHD, k_BMGD, v_BMGD)))
    out_BHLD = functional.scaled_dot_product_attention(q_BHLD, k_BHMD, v_BHMD)
    return out_BHLD.transpose(1, 2), q_BLHD.new_empty(0)


class _OneRank(nn.Module):
    """The sharded forward as a module that maps inputs by name to the whole prediction."""

    def __init__(self, model: DenoiserModel, branch: Branch, team: Team, change: ChangeModule, ring: RingForm) -> None:
        super().__init__()
        module = change(weight_sharing_copy(model.modules[branch.module]))
        self._constants = branch.constants
        self.module = split_weights(module, model.plan, team.tensor) if team.tensor.size > 1 else module
        self._model = model
        self._team = team
        self._ring = ring
        self._hooks = TokenHooks(self.module, model.plan)
        for table in self.module.modules():
            if isinstance(table, SplitTable):
                table.share = cut_features  # type: ignore[method-assign]

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        arguments = {**self._constants, **inputs}
        lengths = self._model.stream_lengths(arguments)
        if self._model.plan.alone and self._team.context.size > 1:
            raise ValueError(
                "this model has blocks that see one stream of tokens alone, which no TensorRT engine of several ranks "
                "does: use engine: torch"
            )
        layout = MarkedLayout.tracing(self._model.plan.streams, lengths, self._team.context.size)
        self._model.set_kernel(self.module, unmasked(_kernel(self._team, layout, self._ring)))
        with self._hooks.over(layout, self._team.context):
            return self._model.forward(self.module, arguments)


def _kernel(team: Team, layout: MarkedLayout, ring: RingForm) -> Kernel:
    spec = team.spec
    if spec.ring > 1 and spec.ulysses == 1:
        if ring == "native":
            return native_ring_kernel(team, layout)
        if ring == "segments":
            return _leave_engine
        raise ValueError(f"{spec.name} does not fit into one engine: export it in segments, or use a native ring")
    grouped = spec.ring > 1 or (spec.allgather_kv > 1 and spec.ulysses > 1)
    return (group_free_kernel if grouped else team_kernel)(sdpa, team, layout)


def _leave_engine(
    q_BLHD: Tensor, k_BLGD: Tensor, v_BLGD: Tensor, /, *, mask_BM: Tensor | None = None, prefix: Prefix | None = None
) -> tuple[Tensor, Tensor]:
    return ATTEND(q_BLHD, k_BLGD, v_BLGD), q_BLHD.new_empty(0)


def unmasked(kernel: Kernel) -> Kernel:
    """Return ``kernel``, with a ValueError for a mask or a prefix."""

    def checked_kernel(
        q_BLHD: Tensor,
        k_BLGD: Tensor,
        v_BLGD: Tensor,
        /,
        *,
        mask_BM: Tensor | None = None,
        prefix: Prefix | None = None,
    ) -> tuple[Tensor, Tensor]:
        if mask_BM is not None:
            raise ValueError(
                "this model masks keys (text of several lengths), which no TensorRT engine does: use engine: torch"
            )
        if prefix is not None:
            raise ValueError(
                "in this model some tokens see only those before them, which no TensorRT engine does: use engine: torch"
            )
        return kernel(q_BLHD, k_BLGD, v_BLGD)

    return checked_kernel


def unchanged(module: nn.Module) -> nn.Module:
    return module


def trace(
    model: DenoiserModel,
    branch: Branch,
    team: Team,
    dynamic: DynamicDims | None = None,
    change: ChangeModule = unchanged,
    ring: RingForm = "none",
) -> fx.GraphModule:
    """Return one branch's exported forward; parameters are ``get_attr`` nodes named ``module.<state_dict key>``.

    ``change`` first replaces layers of a copy of the module (quantisation). ``ring`` selects how a ring runs.
    """
    inputs: ModelInputs = {name: value for name, value in branch.inputs.items() if value is not None}
    shapes = None if dynamic is None else ({name: dynamic.get(name) for name in inputs},)
    with torch.no_grad():
        rank = _OneRank(model, branch, team, change, ring).eval()
        exported = torch.export.export(rank, (dict(inputs),), dynamic_shapes=shapes, strict=False)
        traced = exported.module(check_guards=False)
    assert isinstance(traced, fx.GraphModule)
    return traced


@contextmanager
def offline_team(spec: ParallelSpec, rank: int = 0) -> Iterator[Team]:
    """Yield ``spec``'s team for a trace in one process; torch's fake process group replaces the other ranks."""
    if dist.is_initialized():
        raise ValueError("offline_team needs a process without torch.distributed: use the gang's own team instead")
    dist.init_process_group("fake", rank=rank, world_size=spec.num_ranks, store=fake_store())
    try:
        yield Teams(rank=rank, num_ranks=spec.num_ranks, specs=(spec,), groups=Groups(spec.num_ranks)).team(
            tuple(range(spec.num_ranks)), spec
        )
    finally:
        dist.destroy_process_group()
