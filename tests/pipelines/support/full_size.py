"""Steps of published models at full size on a fake GPU: whether they can be recorded and compiled."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from engines.core.model import Branch, DenoiserModel, StepTensors
from engines.core.shard_plan import ShardPlan
from engines.parallel import local_attention
from engines.parallel.copies import truncated
from engines.parallel.mesh import Team
from engines.parallel.sharded import ShardedModel
from engines.torch_engine import steps
from engines.torch_engine.config import TorchChoices
from engines.torch_engine.steps import RUNS_BEFORE_CAPTURE, StepRunner
from pipelines.blocks.blank import blank_conditioning
from pipelines.blocks.encoder import Conditioning
from pipelines.blocks.opened import OpenedPipeline
from pipelines.checkpoint import Checkpoint
from pipelines.request import MediaRequest
from tests.pipelines.support.pretend_gpu import GPU, GpuTensor, PretendGpu, put_on_gpu
from tests.pipelines.support.real_configs import model_of

Kind = tuple[Any, ...]
"""The key of a block's trace: the classes of its modules, and its arguments."""
Call = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


MAX_VALUES = 10**5
NUM_SIZES = 6
"""Numbers about its picture that Stable Diffusion XL gets beside the prompt."""


@cache
def first_step(name: str, num_pictures: int | None = None) -> tuple[Branch, ...]:
    """Return the branches of the first step of the model's default request, begun on the fake GPU.

    Without ``num_pictures`` it has as few as the model takes.
    """
    checkpoint = Checkpoint.of_configuration(name, GPU, torch.bfloat16)
    request = checkpoint.defaults.request()
    request = request if num_pictures is None else replace(request, num_pictures=num_pictures)
    with PretendGpu(), patch("pipelines.blocks.blank.blank_conditioning", _blank):
        branches = checkpoint.first_step(request)
    return tuple(replace(branch, inputs={key: _light(x) for key, x in branch.inputs.items()}) for branch in branches)


def _light(x: Any) -> Any:
    """Drop the values of large float tensors, which need not be computed."""
    is_large = x.is_floating_point() and x.numel() > MAX_VALUES
    return GpuTensor(_shape(x)) if is_large else x


def _blank(opened: OpenedPipeline, request: MediaRequest, num_tokens: int) -> Conditioning:
    """Return blank outputs of the encoders, also for classes without a declared shape."""
    if opened.spec.has_known_conditioning:
        blank = blank_conditioning(opened, request, num_tokens)
        return replace(
            blank, values={key: _light(x) if isinstance(x, Tensor) else x for key, x in blank.values.items()}
        )
    config = opened.part_config(opened.transformers[0])
    pooled = config["projection_class_embeddings_input_dim"] - NUM_SIZES * config["addition_time_embed_dim"]
    prompt = {
        "prompt_embeds": torch.zeros(1, 77, config["cross_attention_dim"]),
        "pooled_prompt_embeds": torch.zeros(1, pooled),
    }
    values = {**prompt, **{f"negative_{key}": x for key, x in prompt.items()}}
    return Conditioning(values=values, kinds={"denoiser_input_fields": tuple(values)}, dtype=torch.float32)


def model_on_gpu(name: str) -> DenoiserModel:
    """Return one block of each kind of a published model, with shapes as weights."""
    model = truncated(model_of(name), 1)
    for module in model.modules.values():
        put_on_gpu(module)
    return model


@dataclass
class Recorded:
    """Runs one step over ``team``, then records it like a CUDA graph: ``found`` is what a graph cannot record.

    ``calls`` are the first calls of the blocks of each kind, as shapes on "meta".
    """

    model: DenoiserModel
    branch: Branch
    team: Team
    fast: bool = False
    found: list[str] = field(default_factory=list)
    is_recorded: bool = False
    calls: dict[Kind, Call] = field(default_factory=dict)

    def run(self) -> Recorded:
        sharded, config = ShardedModel(self.model, self._watch_blocks), TorchChoices(fast=self.fast, capture=True)
        with (
            PretendGpu() as gpu,
            patch.object(steps, "GraphPool"),
            patch.object(steps, "CapturedStep", self._graph(gpu)),
        ):
            runner = StepRunner(self.model, sharded, config=config, device=GPU)
            for _ in range(RUNS_BEFORE_CAPTURE + 1):
                runner.run(self.branch, self.team)
        sharded.close()
        self.found = list(dict.fromkeys(gpu.found))
        return self

    def _graph(self, gpu: PretendGpu) -> Callable[..., Any]:
        def record(function: Callable[[StepTensors], Tensor], example: StepTensors, pool: Any) -> Any:
            self.is_recorded = True
            with gpu.recording():
                result = function(example)
            return lambda tensors: result

        return record

    def _watch_blocks(self, name: str, module: nn.Module, plan: ShardPlan) -> None:
        kinds = {type(block) for block in plan.blocks_of(module)}
        for block in module.modules():
            if type(block) in kinds:
                block.__dict__["forward"] = self._watched(block)

    def _watched(self, block: nn.Module) -> Callable[..., Any]:
        forward = block.forward

        @functools.wraps(forward)
        def watched(*args: Any, **kwargs: Any) -> Any:
            given = tuple(name for name, value in sorted(kwargs.items()) if value is not None)
            shapes = tree_map(_shape, (args, kwargs))
            classes = tuple((name, type(inner)) for name, inner in block.named_modules())
            self.calls.setdefault((classes, len(args), given), (block, *shapes))
            return forward(*args, **kwargs)

        return watched


def trace(model: DenoiserModel, call: Call) -> None:
    """Trace one block's forward whole, like ``compile_blocks``.

    A kernel is chosen by a host's devices and packages: some releases of Dynamo trace that, others refuse.
    """
    block, args, kwargs = call
    for module in model.modules.values():
        model.set_kernel(module, local_attention.plain_attention)
    memo: dict[int, Any] = {id(x): nn.Parameter(_shape(x), requires_grad=False) for x in block.parameters()}
    copied = copy.deepcopy(block, memo | {id(x): _shape(x) for x in block.buffers()})
    forward = types.MethodType(type(copied).forward, copied)
    torch._dynamo.reset()
    disabled = torch.compiler.disable(lambda *_: local_attention.plain_attention)  # type: ignore[no-untyped-call]
    with patch.object(local_attention, "_kernel_for", disabled):
        torch.compile(forward, dynamic=False, fullgraph=True, backend="eager")(*args, **kwargs)


def _shape(x: Any) -> Any:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") if isinstance(x, Tensor) else x
