"""Memory and work of encoder and decoder beside a gang, from configurations alone."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from engines.core.log_level import log_level
from pipelines.blocks import tree
from pipelines.blocks.meter import ForwardMeter, OperatorLimitError
from pipelines.blocks.opened import OpenedPipeline
from pipelines.directory import part_folder
from pipelines.vae.chunks import ChunkedVae, decodes_in_chunks

PUBLISHED_ENCODERS = Path(__file__).parents[1] / "published_encoders.json"
"""Configurations of shared encoders by name, and the encoders of each published model."""
WORKSPACE = 1.6
"""Memory of a decode as a multiple of its live tensors, for workspaces of kernels and gaps of the allocator.

Measured on an H200 (benchmarks/reports/application_h200_2026-11-23.md and application_one_h200_2026-11-24.md), weights
included: 9.7 GiB for 2048x2048 by FLUX.1's auto-encoder, 9.3 for 832x480x81 by Wan's, 8.9 for 848x480x121 by
HunyuanVideo's; this gives 9.8, 6.3 and 11.2.
"""
COUNTED_FRAMES = 3
"""Latent frames of a chunked clip that are counted; all later ones equal the last."""
NOT_FOR_PROMPTS = ("vision", "visual", "multi_modal_projector", "lm_head")
"""Parts of the names of modules that a text prompt does not use."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageWork:
    """FLOP and memory traffic (bytes) of one request."""

    flops: float
    moved_bytes: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Footprint:
    """Memory and work of encoder and decoder. Bytes of weights are by part; None: no configuration is available."""

    encoder: Mapping[str, int | None]
    decoder: Mapping[str, int | None]
    num_tokens: int
    """Tokens of the counted prompt, whose work is ``prompt``."""
    prompt: StageWork
    decode: StageWork | None = None
    """Work of decoding one request (None: unknown before a request)."""
    decode_bytes: int | None = None
    """Memory of that decode beside the weights."""

    @property
    def unknown(self) -> tuple[str, ...]:
        return tuple(name for name, size in {**self.encoder, **self.decoder}.items() if size is None)


@torch.no_grad()
def footprint(opened: OpenedPipeline, num_tokens: int, latents: Mapping[str, Any] | None) -> Footprint:
    """Count the parts of ``opened``, whose models are on "meta".

    ``num_tokens`` is the prompt's length; ``latents`` are the decoder's input (None: unknown).
    """
    sections = opened.sections
    encoder = {name: _outline(opened, name) for name in opened.parts_of(sections.encode)}
    decoder = {name: _outline(opened, name) for name in opened.parts_of(sections.decode)}
    readers = [part for name, part in encoder.items() if name.startswith("text_encoder") and part is not None]
    weights = [weight for part in readers for weight in _prompt_weights(part)]
    work, held_bytes = (None if latents is None else _decode_work(opened, latents)) or (None, None)
    return Footprint(
        encoder=_sizes(encoder),
        decoder=_sizes(decoder),
        num_tokens=num_tokens,
        prompt=StageWork(
            flops=2.0 * num_tokens * sum(weight.numel() for weight in weights),
            moved_bytes=float(sum(weight.nbytes for weight in weights)),
        ),
        decode=work,
        decode_bytes=held_bytes,
    )


def _outline(opened: OpenedPipeline, name: str) -> Any:
    """Return the part with weights on "meta", an empty module if it has none; None if no configuration is available."""
    part_class = opened.part_class(name)
    if part_class.__module__.startswith("diffusers."):
        part = getattr(opened.outlined, name)
        return part if isinstance(part, nn.Module) else nn.Module()
    if not issubclass(part_class, nn.Module):
        return nn.Module()
    config = encoder_config(opened.path, name)
    if config is None:
        return None
    with torch.device("meta"):
        return part_class(part_class.config_class(**config)).to(opened.dtype)


def encoder_config(path: Path, part: str) -> Mapping[str, Any] | None:
    """Return the configuration of a transformers part: the folder's, or that of a shared encoder.

    None if neither is available.
    """
    file = part_folder(path, part) / "config.json"
    if file.is_file():
        written: Mapping[str, Any] = json.loads(file.read_text())
        return written
    known = json.loads(PUBLISHED_ENCODERS.read_text())
    name = known["models"].get(path.name, {}).get(part)
    found: Mapping[str, Any] | None = known["encoders"].get(name)
    return found


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
    z = z.to("meta", opened.dtype)
    try:
        if opened.spec.decodes_frames_apart and decodes_in_chunks(vae) and z.shape[2] > COUNTED_FRAMES:
            return _of_chunks(vae, z)
        with ForwardMeter() as meter:
            vae.decode(z)
    except OperatorLimitError:
        return None
    return StageWork(flops=meter.flops, moved_bytes=meter.moved_bytes), int(WORKSPACE * meter.peak_bytes)


def _of_chunks(vae: Any, z: Tensor) -> tuple[StageWork, int]:
    """Extrapolate: each latent frame after the second costs as much as the previous one."""
    meters = []
    for num_frames in (COUNTED_FRAMES - 1, COUNTED_FRAMES):
        piecewise = ChunkedVae(vae)
        with ForwardMeter() as meter:
            for _ in range(num_frames):
                piecewise.decode(z[:, :, :num_frames])
        meters.append(meter)
    few, more = meters
    num_left = z.shape[2] - COUNTED_FRAMES
    work = StageWork(
        flops=more.flops + num_left * (more.flops - few.flops),
        moved_bytes=more.moved_bytes + num_left * (more.moved_bytes - few.moved_bytes),
    )
    return work, int(WORKSPACE * more.peak_bytes)


class _Decoding(Exception):
    """Leaves the blocks when they call the auto-encoder with ``latents``."""

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
    pipeline.vae.__dict__["decode"] = decode
    try:
        with log_level(logging.CRITICAL + 1, "diffusers"):  # it logs whatever leaves a block, with a traceback
            tree.run(opened.blocks, [(name,) for name in opened.sections.decode], pipeline, values)
    except _Decoding as reached:
        return reached.latents
    finally:
        del pipeline.vae.__dict__["decode"]
    return None
