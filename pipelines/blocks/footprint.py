"""Memory and work of encoder and decoder beside a gang, from configurations alone."""

from __future__ import annotations

import json
import logging
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from engines.core.logs import log_level
from engines.core.torch_private import TorchDispatchMode, tree_leaves
from pipelines.blocks import tree
from pipelines.blocks.compilation import compiled_bytes
from pipelines.blocks.offloaded_layers import ENCODERS, NO_LAYERS, NOT_FOR_PROMPTS, LayerBytes, layer_bytes
from pipelines.blocks.opened import OpenedPipeline
from pipelines.directory import part_folder, quantiser_of
from pipelines.vae.chunks import ChunkedVae, decodes_in_chunks, skip_unread_cache

PUBLISHED_ENCODERS = Path(__file__).parents[1] / "published_encoders.json"
"""Configurations of shared encoders by name, and the encoders of each published model."""
WORKSPACE = 1.6
"""Memory of a decode as a multiple of its live tensors, for workspaces of kernels and gaps of the allocator.

Values of earlier frames in the cache of a clip in chunks count once: no kernel works on them all. Measured on an H200
(benchmarks/reports/application_h200_2026-11-23.md and application_one_h200_2026-11-24.md), weights included: 9.7 GiB
for 2048x2048 by FLUX.1's auto-encoder, 9.3 for 832x480x81 by Wan's in float32, of which the cache is 3.5, 8.9 for
848x480x121 by HunyuanVideo's; this gives 9.8, 10.0 and 9.4.
"""
COUNTED_FRAMES = 3
"""Latent frames of a chunked clip that are counted; all later ones equal the last."""
DECODES = ("decode", "decode_segments")
"""Methods of an auto-encoder that blocks call."""
VIEWS = frozenset(
    {"_unsafe_view", "alias", "as_strided", "chunk", "detach", "empty", "empty_like", "expand", "permute", "reshape"}
    | {"select", "slice", "split", "squeeze", "t", "transpose", "unbind", "unsqueeze", "view"}
)
"""Operators that read and write nothing."""
MAX_OPERATORS = 8000
"""Limit of operators: a few seconds of one core."""


class OperatorLimitError(RuntimeError):
    """A forward has more than ``MAX_OPERATORS`` operators."""


class ForwardMeter:
    """A context that counts forwards on "meta". ``OperatorLimitError`` above ``MAX_OPERATORS``."""

    def __init__(self) -> None:
        self._attention, self._storages = _FusedAttention(), _Storages()
        self._products, self._stack = FlopCounterMode(display=False), ExitStack()

    def __enter__(self) -> Self:
        for mode in (self._attention, self._products, self._storages):
            self._stack.enter_context(mode)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()

    @property
    def flops(self) -> int:
        """FLOP of products, convolutions and attention, counted as one fused kernel."""
        return int(self._products.get_total_flops()) + self._attention.flops

    @property
    def moved_bytes(self) -> int:
        """Bytes that operators read and write."""
        return self._storages.moved_bytes

    @property
    def peak_bytes(self) -> int:
        """Peak memory of live results."""
        return self._storages.peak_bytes

    @property
    def live_bytes(self) -> int:
        """Memory of results that are live now."""
        return self._storages.live_bytes


class _FusedAttention(TorchFunctionMode):
    """Fused attention: on "meta" it would otherwise allocate the products of all queries with all keys."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is not functional.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        named = dict(zip(("query", "key", "value"), args, strict=False)) | dict(kwargs or {})
        query, key, value = named["query"], named["key"], named["value"]
        rows = query.numel() // query.shape[-1]
        self.flops += 2 * rows * key.shape[-2] * (query.shape[-1] + value.shape[-1])
        return query.new_empty(*query.shape[:-1], value.shape[-1])


class _Storages(TorchDispatchMode):
    """Memory of live storages, by the lifetimes of Python's references."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.moved_bytes = self.peak_bytes = self.live_bytes = 0
        self._live: set[int] = set()
        self._num_operators = 0

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self._num_operators += 1
        if self._num_operators > MAX_OPERATORS:
            raise OperatorLimitError
        out = func(*args, **(kwargs or {}))
        results, given = _tensors(out), _tensors((args, dict(kwargs or {})))
        if func.overloadpacket.__name__ not in VIEWS:
            self.moved_bytes += sum(x.nbytes for x in (*results, *given))
        old = {x.untyped_storage()._cdata for x in given}
        for x in results:
            if x.untyped_storage()._cdata not in old:  # not a view or an in-place result
                self._add(x.untyped_storage())
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._live:
            return
        self._live.add(key)
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._release, key, size)

    def _release(self, key: int, size: int) -> None:
        self._live.discard(key)
        self.live_bytes -= size


def _tensors(values: Any) -> list[Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, Tensor)]


@dataclass(frozen=True, kw_only=True, slots=True)
class StageWork:
    """FLOP and memory traffic (bytes) of one request."""

    flops: float
    """Floating-point operations; a multiply and an add count as two."""
    moved_bytes: float
    """Bytes read from and written to device memory."""

    def times(self, number: int) -> StageWork:
        return StageWork(flops=number * self.flops, moved_bytes=number * self.moved_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Footprint:
    """Memory and work of encoder and decoder."""

    encoder: Mapping[str, int | None]
    """Bytes of weights by part; None without a configuration."""
    decoder: Mapping[str, int | None]
    """Bytes of weights by part; None without a configuration."""
    num_tokens: int
    """Tokens of the counted prompt."""
    prompt: StageWork
    """Work of encoding the prompt."""
    compiled_bytes: int = 0
    """Bytes that ``decoder.compile`` adds to the decoder's weights on a GPU."""
    decode: StageWork | None = None
    """Work of decoding one request (None: unknown before a request)."""
    decode_bytes: int | None = None
    """Memory of that decode beside the weights."""
    layers: LayerBytes = NO_LAYERS
    """Layers of the text encoders, if they can be in host memory."""
    ranks: Mapping[str, int | None] = field(default_factory=dict)
    """Bytes of weights by part that each rank has beside the transformers."""
    rank_decode_bytes: int = 0
    """Memory of a decode on each rank, between the segments of a clip."""

    @property
    def unknown(self) -> tuple[str, ...]:
        """Parts of unknown size."""
        return tuple(name for name, size in {**self.encoder, **self.decoder}.items() if size is None)


@torch.no_grad()
def footprint(opened: OpenedPipeline, num_tokens: int, latents: Mapping[str, Any] | None) -> Footprint:
    """Count the parts of ``opened``, whose models are on "meta".

    ``num_tokens`` is the prompt's length; ``latents`` are the decoder's input (None: unknown).
    """
    sections = opened.sections
    encoder = {name: _outline(opened, name) for name in opened.loaded_parts(sections.encode)}
    decoder = {name: _outline(opened, name) for name in opened.loaded_parts(sections.decode)}
    readers = {name: part for name, part in encoder.items() if name.startswith(ENCODERS) and part is not None}
    weights = [weight for part in readers.values() for weight in _prompt_weights(part)]
    can_move = not any(quantiser_of(part_folder(opened.path, name)) for name in readers)
    work, decode_bytes = (None if latents is None else _decode_work(opened, latents)) or (None, None)
    return Footprint(
        encoder=_sizes(encoder),
        decoder=_sizes(decoder),
        num_tokens=num_tokens,
        prompt=StageWork(
            flops=2.0 * num_tokens * sum(weight.numel() for weight in weights),
            moved_bytes=float(sum(weight.nbytes for weight in weights)),
        ),
        compiled_bytes=compiled_bytes(decoder.get("vae")),
        decode=work,
        decode_bytes=decode_bytes,
        layers=sum(map(layer_bytes, readers.values()), NO_LAYERS) if can_move else NO_LAYERS,
        ranks=_sizes({name: _outline(opened, name) for name in opened.spec.rank_parts}),
    )


def _outline(opened: OpenedPipeline, name: str) -> Any:
    """Return the part as it is loaded, with weights on "meta"; an empty module if it has none.

    None if no configuration is available.
    """
    part_class, dtype = opened.part_class(name), opened.dtype_of(name)
    if part_class.__module__.startswith("diffusers."):
        part = getattr(opened.outlined, name)
        if not isinstance(part, nn.Module):
            return nn.Module()
        return part.to(dtype) if dtype == torch.float32 else part  # other dtypes keep some weights in float32
    if not issubclass(part_class, nn.Module):
        return nn.Module()
    config = encoder_config(opened.path, name)
    if config is None:
        return None
    with torch.device("meta"):
        return part_class(part_class.config_class(**config)).to(dtype)


def encoder_config(path: Path, part: str) -> Mapping[str, Any] | None:
    """Return the configuration of a transformers part: the folder's, or that of a shared encoder.

    None if neither is available.
    """
    file = part_folder(path, part) / "config.json"
    if file.is_file():
        written: Mapping[str, Any] = json.loads(file.read_text())
        return written
    published = json.loads(PUBLISHED_ENCODERS.read_text())
    name = published["models"].get(path.name, {}).get(part)
    config: Mapping[str, Any] | None = published["encoders"].get(name)
    return config


def _sizes(parts: Mapping[str, nn.Module | None]) -> dict[str, int | None]:
    """Return bytes by part, without parts that have no weights, such as tokenizers."""
    sizes = {name: None if part is None else sum(x.nbytes for x in part.parameters()) for name, part in parts.items()}
    return {name: size for name, size in sizes.items() if size != 0}


def _prompt_weights(part: nn.Module) -> list[Tensor]:
    """Return the weights that each token is multiplied with."""
    tables = {id(weight) for one in part.modules() if isinstance(one, nn.Embedding) for weight in one.parameters()}
    return [
        weight
        for name, weight in part.named_parameters()
        if id(weight) not in tables and not any(word in name for word in NOT_FOR_PROMPTS)
    ]


def _decode_work(opened: OpenedPipeline, latents: Mapping[str, Any]) -> tuple[StageWork, int] | None:
    """Return work and memory of the auto-encoder beside its weights.

    None if the blocks do not call one, or it has too many operators to count.
    """
    pipeline = opened.outlined
    vae: Any = getattr(pipeline, "vae", None)
    z = None if vae is None else _decoded_latents(opened, pipeline, latents)
    if z is None:
        return None
    vae.to("meta")
    z = z.to("meta", opened.dtype_of("vae"))
    try:
        if opened.spec.decodes_frames_apart and decodes_in_chunks(vae) and z.shape[2] > COUNTED_FRAMES:
            return _chunked_decode_work(vae, z)
        if decodes_in_chunks(vae):
            skip_unread_cache(vae)
        with ForwardMeter() as meter:
            vae.decode(z)
    except OperatorLimitError:
        return None
    return StageWork(flops=meter.flops, moved_bytes=meter.moved_bytes), int(WORKSPACE * meter.peak_bytes)


def _chunked_decode_work(vae: Any, z: Tensor) -> tuple[StageWork, int]:
    """Extrapolate: each latent frame after the second costs as much as the previous one."""
    meters, cache_bytes = [], 0
    for num_frames in (COUNTED_FRAMES - 1, COUNTED_FRAMES):
        piecewise = ChunkedVae(vae)
        with ForwardMeter() as meter:
            for _ in range(num_frames):
                piecewise.decode(z[:, :, :num_frames])
            cache_bytes = meter.live_bytes  # the frames themselves are gone
        meters.append(meter)
    few, more = meters
    num_left = z.shape[2] - COUNTED_FRAMES
    work = StageWork(
        flops=more.flops + num_left * (more.flops - few.flops),
        moved_bytes=more.moved_bytes + num_left * (more.moved_bytes - few.moved_bytes),
    )
    return work, cache_bytes + int(WORKSPACE * (more.peak_bytes - cache_bytes))


class _Decoding(Exception):
    """Ends a run of the blocks when they call the auto-encoder with ``latents``."""

    def __init__(self, latents: Tensor) -> None:
        super().__init__()
        self.latents = latents


def _decoded_latents(opened: OpenedPipeline, pipeline: Any, latents: Mapping[str, Any]) -> Tensor | None:
    """Return the input of the auto-encoder of ``pipeline``."""

    def decode(latents: Tensor, *_: Any, **__: Any) -> None:
        raise _Decoding(latents)

    values = opened.state({})
    for name, value in latents.items():
        values.set(name, value)
    pipeline.vae.__dict__.update(dict.fromkeys(DECODES, decode))
    try:
        with log_level(logging.CRITICAL + 1, "diffusers"):  # it logs every exception of a block, with a traceback
            tree.run(opened.blocks, [(name,) for name in opened.sections.decode], pipeline, values)
    except _Decoding as reached:
        return reached.latents
    finally:
        for name in DECODES:
            del pipeline.vae.__dict__[name]
    return None
