"""Divides a class without a family by diffusers' own plan (``_cp_plan``), converted to a ``ShardPlan``.

Inputs with names of text are one stream; all else that the plan cuts is the picture's. Text stays whole if the blocks
have cross-attention to it. A forward pass on "meta", up to the first block, measures the streams' lengths.

Such a gang has no known step for its self-check, so only plain classes are divided. Excluded are plans that cut inside
every block or gather several tensors, attentions outside the blocks, and names beside ``attn``, ``attn1``, ``attn2``.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from engines.core.shard_plan import ShardPlan, TokenGather, TokenShard, named_like
from pipelines.models.generic.outline import empty, repeated_blocks
from pipelines.models.generic.spec import GenericSpec
from pipelines.models.spec import Config

if TYPE_CHECKING:
    from torch import Tensor, nn

    from engines.core.attention import Kernel
    from engines.core.model import Arguments


TEXT, IMAGE = "text", "image"
TEXT_PREFIXES = ("encoder_", "txt_", "text_")
SELF, CROSS = (".attn", ".attn1"), ".attn2"
"""Names of self-attention and of cross-attention in diffusers' blocks."""


def can_be_divided(module_class: Any) -> bool:
    """Return whether the class has a plan that cuts tokens before the blocks and joins them after."""
    gathers = [name for name, spec in _plan_of(module_class).items() if not isinstance(spec, dict)]
    return len(gathers) == 1 and "." not in gathers[0]


class ConvertedSpec(GenericSpec):
    """A class that is divided by diffusers' own plan.

    Caches plans by configuration, and stream lengths by configuration and the shapes of a call.
    """

    def __init__(self, module_class: Any) -> None:
        super().__init__(module_class)
        self._plans: dict[str, ShardPlan] = {}
        self._lengths: dict[tuple[str, str], Mapping[str, int]] = {}

    def shard_plan(self, config: Config) -> ShardPlan:
        key = _key(config)
        if key not in self._plans:
            self._plans[key] = _convert(self.module_class, empty(self.module_class, config))
        return self._plans[key]

    def stream_lengths(self, config: Config, arguments: Arguments) -> Mapping[str, int]:
        """Return the tokens of each stream, measured at the first tensors that the plan cuts."""
        key = _key(config), str({name: getattr(x, "shape", x) for name, x in arguments.items()})
        if key not in self._lengths:
            plan, module = self.shard_plan(config), empty(self.module_class, config)
            self._lengths[key] = _measure_lengths(module, plan, arguments) if plan.shards else {IMAGE: 1}
        return self._lengths[key]

    def set_kernel(self, module: nn.Module, kernel: Kernel) -> None:
        """Set the kernel through diffusers' dispatcher, except in cross-attention: every rank has the text whole."""
        from pipelines.blocks import attention

        attention.set_kernel(module, kernel, local=tuple(_cross_attentions(module)))


def _convert(module_class: Any, module: nn.Module) -> ShardPlan:
    """Convert the plan. Divide nothing if it cuts text and numbered outputs, which may be of either stream."""
    has_cross = any(True for _ in _cross_attentions(module))
    shards = tuple(shard for shard in _shards(module_class) if not (has_cross and shard.stream == TEXT))
    is_ambiguous = any(shard.stream == TEXT for shard in shards) and any(isinstance(shard.key, int) for shard in shards)
    if is_ambiguous or not _has_plain_attention(module):
        return ShardPlan(streams=(IMAGE,), blocks=repeated_blocks(module), shards=(), gathers=(), linears=())
    plan = _plan_of(module_class).items()
    return ShardPlan(
        streams=tuple(stream for stream in (TEXT, IMAGE) if any(shard.stream == stream for shard in shards)),
        blocks=repeated_blocks(module),
        shards=shards,
        gathers=tuple(
            TokenGather(module=name, dim=spec.gather_dim, stream=IMAGE)
            for name, spec in plan
            if not isinstance(spec, dict)
        ),
        linears=(),
    )


def _has_plain_attention(module: nn.Module) -> bool:
    processed = ((name, getattr(inner, "processor", None)) for name, inner in module.named_modules())
    routed = [name for name, processor in processed if hasattr(processor, "_parallel_config")]
    blocks = tuple(f"{name}." for name in repeated_blocks(module))
    return bool(routed) and all(name.startswith(blocks) and name.endswith((*SELF, CROSS)) for name in routed)


def _shards(module_class: Any) -> Iterator[TokenShard]:
    for module, spec in _plan_of(module_class).items():
        for key, cut in spec.items() if isinstance(spec, dict) else ():
            stream = TEXT if str(key).startswith(TEXT_PREFIXES) else IMAGE
            where: Any = "output" if cut.split_output else "input"
            yield TokenShard(module=module, where=where, key=key, dim=cut.split_dim, stream=stream)


def _plan_of(module_class: Any) -> Mapping[str, Any]:
    plan: Mapping[str, Any] = getattr(module_class, "_cp_plan", None) or {}
    return plan


def _cross_attentions(module: nn.Module) -> Iterator[str]:
    return (name for name, _ in module.named_modules() if name.endswith(CROSS))


class _AllMeasured(Exception):
    """Ends the pass when all lengths are measured."""


def _measure_lengths(module: nn.Module, plan: ShardPlan, arguments: Arguments) -> Mapping[str, int]:
    """Run ``module`` on "meta" until the plan has cut a tensor of each stream; return their lengths."""
    import torch

    from pipelines.blocks.arguments import nested

    lengths: dict[str, int] = {}

    def record(shard: TokenShard, x: Tensor | None) -> None:
        (stream,) = shard.streams
        if x is not None and x.ndim > shard.dim and x.shape[shard.dim] > 1:
            lengths.setdefault(stream, x.shape[shard.dim])
        if len(lengths) == len(plan.streams):
            raise _AllMeasured

    for shard in plan.shards:
        for target in named_like(module, shard.module):
            _watch(target, shard, record)
    on_meta = {name: x.to("meta") if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}
    try:
        with torch.no_grad():
            module(**nested(on_meta))
    except _AllMeasured:
        return lengths
    missing = sorted(set(plan.streams) - set(lengths))
    raise ValueError(f"{type(module).__name__} has a plan, but its forward cuts no {' or '.join(missing)}")


def _watch(target: nn.Module, shard: TokenShard, record: Callable[[TokenShard, Any], None]) -> None:
    def record_output(_module: nn.Module, _args: Any, output: Any) -> None:
        record(shard, output[int(shard.key)] if isinstance(output, tuple) else output)

    if shard.where == "output":
        target.register_forward_hook(record_output)
        return
    names = list(inspect.signature(target.forward).parameters)

    def record_input(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        record(shard, {**dict(zip(names, args, strict=False)), **kwargs}.get(str(shard.key)))

    target.register_forward_pre_hook(record_input, with_kwargs=True)


def _key(config: Config) -> str:
    return json.dumps(dict(config), default=str, sort_keys=True)
