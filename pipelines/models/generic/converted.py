"""Diffusers' own plan of a class (``_cp_plan``) as a ``ShardPlan``: how a class without a file here is divided.

Its streams are found from it: inputs whose names speak of text are one, all else that it cuts is the picture's. Where
the blocks attend to the text by attentions of their own, these keep it whole. How long a stream is, a pass over the
class on "meta" says, as far as the first block.

No known step checks such a gang, so what is not plain is not divided: plans that cut and gather inside every block or
gather several tensors, attentions outside the blocks, or blocks with others than ``attn``, ``attn1`` and ``attn2``.
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
OF_TEXT = ("encoder_", "txt_", "text_")
SELF, CROSS = (".attn", ".attn1"), ".attn2"
"""What diffusers' blocks call the attention to a text that goes along beside them."""


def can_be_divided(module_class: Any) -> bool:
    """Whether the class has a plan of a form that is converted: tokens are cut before the blocks and joined after."""
    gathers = [name for name, spec in _plan_of(module_class).items() if not isinstance(spec, dict)]
    return len(gathers) == 1 and "." not in gathers[0]


class ConvertedSpec(GenericSpec):
    """A class that is divided by diffusers' own plan.

    Plans are cached by configuration, lengths of streams by the shapes of a call.
    """

    def __init__(self, module_class: Any) -> None:
        super().__init__(module_class)
        self._plans: dict[str, ShardPlan] = {}
        self._lengths: dict[tuple[str, str], Mapping[str, int]] = {}

    def shard_plan(self, config: Config) -> ShardPlan:
        key = _key(config)
        if key not in self._plans:
            self._plans[key] = _converted(self.module_class, empty(self.module_class, config))
        return self._plans[key]

    def stream_lengths(self, config: Config, arguments: Arguments) -> Mapping[str, int]:
        """Tokens by stream, from the shapes at the first places where the plan cuts."""
        key = _key(config), str({name: getattr(x, "shape", x) for name, x in arguments.items()})
        if key not in self._lengths:
            plan, module = self.shard_plan(config), empty(self.module_class, config)
            self._lengths[key] = _seen_lengths(module, plan, arguments) if plan.shards else {IMAGE: 1}
        return self._lengths[key]

    def set_kernel(self, module: nn.Module, kernel: Kernel) -> None:
        """Set the kernel through diffusers' dispatcher, but not where the keys are a text that every rank has whole."""
        from pipelines.blocks import attention

        attention.set_kernel(module, kernel, local=tuple(_crossing(module)))


def _converted(module_class: Any, module: nn.Module) -> ShardPlan:
    """Nothing is divided where a table leaves in parts and nobody says which part is the text's either."""
    keeps_text = any(True for _ in _crossing(module))
    shards = tuple(shard for shard in _shards(module_class) if not (keeps_text and shard.stream == TEXT))
    is_unclear = any(shard.stream == TEXT for shard in shards) and any(isinstance(shard.key, int) for shard in shards)
    if is_unclear or not _attends_plainly(module):
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


def _attends_plainly(module: nn.Module) -> bool:
    processed = ((name, getattr(inner, "processor", None)) for name, inner in module.named_modules())
    routed = [name for name, processor in processed if hasattr(processor, "_parallel_config")]
    blocks = tuple(f"{name}." for name in repeated_blocks(module))
    return bool(routed) and all(name.startswith(blocks) and name.endswith((*SELF, CROSS)) for name in routed)


def _shards(module_class: Any) -> Iterator[TokenShard]:
    for module, spec in _plan_of(module_class).items():
        for key, cut in spec.items() if isinstance(spec, dict) else ():
            stream = TEXT if str(key).startswith(OF_TEXT) else IMAGE
            where: Any = "output" if cut.split_output else "input"
            yield TokenShard(module=module, where=where, key=key, dim=cut.split_dim, stream=stream)


def _plan_of(module_class: Any) -> Mapping[str, Any]:
    plan: Mapping[str, Any] = getattr(module_class, "_cp_plan", None) or {}
    return plan


def _crossing(module: nn.Module) -> Iterator[str]:
    return (name for name, _ in module.named_modules() if name.endswith(CROSS))


class _AllSeen(Exception):
    """The pass went as far as it must."""


def _seen_lengths(module: nn.Module, plan: ShardPlan, arguments: Arguments) -> Mapping[str, int]:
    """A forward of ``module``, which is on "meta", until a tensor of each stream came by a place where it is cut."""
    import torch

    from pipelines.blocks.arguments import nested

    lengths: dict[str, int] = {}

    def note(shard: TokenShard, x: Tensor | None) -> None:
        (stream,) = shard.streams
        if x is not None and x.ndim > shard.dim and x.shape[shard.dim] > 1:
            lengths.setdefault(stream, x.shape[shard.dim])
        if len(lengths) == len(plan.streams):
            raise _AllSeen

    for shard in plan.shards:
        for target in named_like(module, shard.module):
            _watch(target, shard, note)
    on_meta = {name: x.to("meta") if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}
    try:
        with torch.no_grad():
            module(**nested(on_meta))
    except _AllSeen:
        return lengths
    missing = sorted(set(plan.streams) - set(lengths))
    raise ValueError(f"{type(module).__name__} has a plan, but no {' or '.join(missing)} came by where it cuts")


def _watch(target: nn.Module, shard: TokenShard, note: Callable[[TokenShard, Any], None]) -> None:

    if shard.where == "output":
        target.register_forward_hook(
            lambda _module, _args, output: note(shard, output[int(shard.key)] if isinstance(output, tuple) else output)
        )
        return
    names = list(inspect.signature(target.forward).parameters)

    def look(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        note(shard, {**dict(zip(names, args, strict=False)), **kwargs}.get(str(shard.key)))

    target.register_forward_pre_hook(look, with_kwargs=True)


def _key(config: Config) -> str:
    return json.dumps(dict(config), default=str, sort_keys=True)
