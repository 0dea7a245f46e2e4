"""Published transformers at full size with random weights, and the inputs of their first step."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.models.making import default_dtype, draw_vectors
from engines.core.model import LATENTS, TIMESTEP, Branch, DenoiserModel
from engines.parallel.copies import first_blocks, truncated
from pipelines.blocks.blank import blank_conditioning
from pipelines.blocks.denoiser import as_denoiser
from pipelines.blocks.encoder import on_device
from pipelines.blocks.opened import OpenedPipeline
from pipelines.blocks.sampler import BlocksSampler
from pipelines.checkpoint import Checkpoint
from pipelines.defaults import Defaults
from pipelines.directory import read_config
from pipelines.size import Size

SEED = 1
PICTURE, PICTURE_TOKENS = Size(width=1024, height=1024), 512
SMALL_SIDE = 4
"""Side of pictures on a CPU, in the model's multiples."""
ATTENTIONS = ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")
"""Torch's fused kernels. Its counter of operations does not know all of them, nor all with grouped heads."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedModel:
    """A model and the calls of its first step, on one device."""

    name: str
    size: Size
    num_tokens: int
    module: Any
    """The first transformer, equal on all ranks; with ``num_blocks``, a copy that shares the weights of ``whole``."""
    own_calls: tuple[Mapping[str, Any], ...]
    """The calls as diffusers' blocks make them."""
    branches: tuple[Branch, ...]
    """The calls as engines get them."""
    opened: OpenedPipeline
    whole: Any
    """The transformer with all blocks."""
    num_blocks: int | None = None
    """Blocks that ``module`` has of each list; None for all."""

    @classmethod
    @torch.no_grad()
    def made(
        cls,
        name: str,
        device: torch.device,
        dtype: torch.dtype,
        size: Size | None = None,
        num_tokens: int | None = None,
        num_branches: int = 1,
        batch: int = 1,
        num_blocks: int | None = None,
    ) -> PublishedModel:
        """Make the model with random weights.

        By default ``size`` and ``num_tokens`` are ``PICTURE`` and ``PICTURE_TOKENS``, and a clip's own. On a CPU the
        size is small. Where jobs pad prompts (``ModelSpec.pad_conditioning``), ``num_tokens`` must be a length without
        padding, or the two calls differ. The first ``num_branches`` forwards of a step are kept, each for ``batch``
        pictures with the same prompt. ``num_blocks`` keeps so many blocks of each list of the module. ValueError for
        unknown names, sizes that the model does not make, more branches than a step has, and a batch of a model that
        makes pictures one by one.
        """
        checkpoint = Checkpoint.of_configuration(name, device, dtype)
        opened = OpenedPipeline(checkpoint.path, device, dtype)
        request = checkpoint.defaults.request(size or _usual_size(checkpoint.defaults, device))
        tokens = num_tokens or _usual_tokens(checkpoint.defaults)
        conditioning = blank_conditioning(opened, request, tokens, torch.Generator().manual_seed(SEED))
        sampler = BlocksSampler(opened)
        state = sampler.begin(request, conditioning)
        calls, branches = [call for _, call in sampler.calls(state)], sampler.branches(state)
        if len(branches) < num_branches:
            raise ValueError(f"a step of {name} has {len(branches)} branches, not {num_branches}")
        kept = [in_batch(*pair, batch) for pair in zip(branches, calls, strict=True)][:num_branches]
        whole = _random(opened, device, dtype)
        return cls(
            name=name,
            size=Size(width=request.width, height=request.height, num_frames=request.num_frames),
            num_tokens=tokens,
            module=whole if num_blocks is None else first_blocks(whole, _lists(opened), num_blocks),
            own_calls=tuple(_rounded_as(branch, on_device(call, device, {})) for branch, call in kept),
            branches=tuple(branch for branch, _ in kept),
            opened=opened,
            whole=whole,
            num_blocks=num_blocks,
        )

    @property
    def branch(self) -> Branch:
        """The first branch."""
        return self.branches[0]

    def blocks(self) -> tuple[tuple[int, int], ...]:
        """Return for each list of blocks how many ``module`` has, and how many the model has."""
        names = _lists(self.opened)
        return tuple((len(self.module.get_submodule(name)), len(self.whole.get_submodule(name))) for name in names)

    def call(self) -> Tensor:
        """Return all values that diffusers' module predicts, branch by branch. Not for use after ``denoiser``."""
        return self._values(self.module, self.own_calls)

    def exact_call(self) -> Tensor:
        """Return the values of ``call`` in float32."""
        exact = copy.deepcopy(self.module).float()
        wide: Any = tree_map(_float32, self.own_calls)
        values = self._values(exact, wide)
        del exact
        torch.cuda.empty_cache()  # NCCL needs some of what GPUs of 80 GB have left
        return values

    def _values(self, module: Any, calls: Iterable[Mapping[str, Any]]) -> Tensor:
        outputs = [module(**call, return_dict=False) for call in calls]
        return torch.cat([self._painted(x).flatten() for x in tree_leaves(outputs) if isinstance(x, Tensor)])

    def _painted(self, x: Tensor) -> Tensor:
        """Return ``x`` without the predictions for tokens before those of the picture, which no job uses."""
        latents = self.branch.inputs.get(LATENTS)
        if latents is None or x.ndim != 3 or latents.ndim != 3:
            return x
        return x[:, -latents.shape[1] :] if x.shape[1] > latents.shape[1] else x

    def flop(self) -> int:
        """Return the floating-point operations of matrix products and attention in ``call``."""
        operators = (getattr(torch.ops.aten, f"_scaled_dot_product_{name}") for name in ATTENTIONS)
        with FlopCounterMode(display=False, custom_mapping=dict.fromkeys(operators, _attention_flop)) as counter:
            self.call()
        return int(counter.get_total_flops())

    def denoiser(self) -> DenoiserModel:
        """Return the module with its plan. Its attention is Troupe's from now on."""
        (name, *_), config = self.opened.transformers, self.opened.part_config(self.opened.transformers[0])
        model = as_denoiser({name: self.whole}, self.opened.spec, config, probe=tuple)
        return model if self.num_blocks is None else truncated(model, self.num_blocks)


def _lists(opened: OpenedPipeline) -> tuple[str, ...]:
    """Return the names of the transformer's lists of blocks."""
    return opened.spec.shard_plan(opened.part_config(opened.transformers[0])).blocks


def in_batch(branch: Branch, call: Mapping[str, Any], size: int) -> tuple[Branch, dict[str, Any]]:
    """Return both for ``size`` pictures. ValueError if the latents have no dim for them."""
    if size == 1:
        return branch, dict(call)
    if LATENTS not in branch.inputs or branch.inputs[LATENTS].shape[0] != 1:
        raise ValueError(f"this model's pictures come one by one, not {size} in one forward")
    inputs = {name: _repeated(x, size) for name, x in branch.inputs.items()}
    noise = torch.Generator(inputs[LATENTS].device).manual_seed(SEED)
    inputs[LATENTS] = torch.empty_like(inputs[LATENTS]).normal_(generator=noise)
    repeated = {name: _repeated(x, size) for name, x in call.items()}
    return replace(branch, inputs=inputs), {**repeated, LATENTS: inputs[LATENTS]}


def _float32(x: Any) -> Any:
    return x.float() if isinstance(x, Tensor) and x.is_floating_point() else x


def _repeated(x: Any, size: int) -> Any:
    """Return a tensor of one row with ``size`` rows, and anything else unchanged."""
    return x.repeat(size, *[1] * (x.ndim - 1)) if isinstance(x, Tensor) and x.ndim and x.shape[0] == 1 else x


def small_size(defaults: Defaults) -> Size:
    """Return a size with few tokens, for a CPU."""
    side = SMALL_SIDE * defaults.size_multiple
    frames = max(defaults.min_frames, 1 + defaults.frame_multiple) if defaults.kind == "video" else None
    return Size(width=side, height=side, num_frames=frames)


def _usual_size(defaults: Defaults, device: torch.device) -> Size:
    if device.type == "cpu":
        return small_size(defaults)
    if defaults.kind == "image":
        return PICTURE
    return Size(width=defaults.width, height=defaults.height, num_frames=defaults.num_frames)


def _usual_tokens(defaults: Defaults) -> int:
    """Return the usual number of tokens, or 0 if a model has its own."""
    return PICTURE_TOKENS if defaults.kind == "image" else defaults.max_tokens


def _rounded_as(branch: Branch, call: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``call`` with the timestep of ``branch``: some of diffusers' blocks round it to bfloat16, another step.

    A branch with a timestep for each token has equal ones, and the call has it once.
    """
    same = {name: x for name, x in branch.inputs.items() if name in call and call[name].shape == x.shape}
    if TIMESTEP in call and TIMESTEP in branch.inputs and call[TIMESTEP].ndim < branch.inputs[TIMESTEP].ndim:
        same[TIMESTEP] = branch.inputs[TIMESTEP].flatten(1)[:, 0]
    return {**call, **same}


def _attention_flop(query: torch.Size, key: torch.Size, *_: Any, **__: Any) -> int:
    """Return the operations of attention from shapes (B, H, L, D) and (B, G, M, D)."""
    batch, heads, length, dim = query
    return 4 * batch * heads * length * key[2] * dim


def _random(opened: OpenedPipeline, device: torch.device, dtype: torch.dtype) -> Any:
    """Return the module as its class makes it, but with norms, biases and modulations away from 1 and 0."""
    torch.manual_seed(SEED)
    name = opened.transformers[0]
    with torch.device(device), default_dtype(dtype):
        module = opened.part_class(name).from_config(dict(read_config(opened.path, name)))
        draw_vectors(module)
    return opened.as_loaded(module)
