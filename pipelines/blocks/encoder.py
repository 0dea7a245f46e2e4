"""Encode a request's prompt and pictures to conditioning, with a pipeline's encoding blocks."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from diffusers.modular_pipelines.modular_pipeline import PipelineState
from PIL.Image import Image
from torch import Tensor, nn

from engines.core.parcel import Shapes
from engines.parallel.offload import BlockOffload
from pipelines.blocks import arguments, tree
from pipelines.blocks.compilation import compile_calls, compile_encoders, compute_as_captured
from pipelines.blocks.denoiser import guiders_of, set_scale
from pipelines.blocks.offloaded_layers import layer_weights, offload_layers, text_encoders_of
from pipelines.blocks.opened import CONTROL_PICTURE, TOKENIZERS, OpenedPipeline, modules_of
from pipelines.blocks.state import NoiseState
from pipelines.request import NO_PICTURES, InputPictures, MediaRequest

logger = logging.getLogger(__name__)

LENGTH = "max_sequence_length"
"""The input at which blocks truncate prompts, in tokens. Blocks without it accept prompts of any length."""
PROMPTS = ("prompt", "negative_prompt")
RESIZES = "_auto_resize"
"""The input that lets blocks resize pictures to the published model's sizes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Conditioning:
    """The encoders' outputs for a request, by the names that later blocks read; tensors on the CPU."""

    values: Mapping[str, Any]
    """Tensors and other values by the name that the blocks of ranks and decoder read."""
    kinds: Mapping[str, tuple[str, ...]]
    """Names of the groups that values belong to."""
    dtype: torch.dtype
    """The encoders' dtype."""
    negative: Mapping[str, Any] | None = None
    """Values of the negative prompt, if the pipeline itself supports one prompt only."""
    noise: NoiseState | None = None
    """The generator's state, if an encoder drew from it."""
    later: Mapping[str, Any] | None = None
    """Values that a second pass over the latents has in place of these: pictures in its size."""

    def of_second_stage(self) -> Conditioning:
        """Return the conditioning of a second pass over the latents."""
        return replace(self, values={**self.values, **(self.later or {})}, later=None)

    @property
    def shapes(self) -> Shapes:
        """The shapes of the tensors that jobs compute with."""
        tensors, _ = arguments.split({**self.values, "negative": self.negative})
        return tuple(sorted((name, tuple(x.shape)) for name, x in tensors.items()))


class BlocksEncoder:
    """Encodes one request at a time: tokenizers store the padding of their last call.

    Prompts are truncated to ``max_tokens`` (0: the pipeline's own limit). ``fits_pictures`` (``Defaults``) crops
    pictures to the request's size. ``compiled``: prompt lengths that are encoded inside ``compile_calls`` run compiled.
    ``offloads_layers``: the text encoders' layers are in host memory, and no call is captured.
    """

    _offloads: Sequence[BlockOffload] = ()

    def __init__(
        self,
        opened: OpenedPipeline,
        max_tokens: int = 0,
        *,
        fits_pictures: bool = False,
        compiled: bool = False,
        offloads_layers: bool = False,
    ) -> None:
        self._opened = opened
        self._crops_pictures = fits_pictures or opened.spec.fits_pictures
        self._sections = opened.sections.encode
        self._pipeline = opened.load(self._sections, layer_weights if offloads_layers else None)
        if offloads_layers:
            self._offloads = self._offload(compiled=compiled)
        self._compiled = compile_encoders(self._pipeline) if compiled and not offloads_layers else ()
        self._later_inputs = opened.input_names((opened.sections.denoise, *opened.sections.decode))
        self.max_tokens = opened.max_tokens(max_tokens)

    def _offload(self, *, compiled: bool) -> list[BlockOffload]:
        """Move layers to host memory, with the kernels that a ``compiled`` encoder has."""
        encoders = text_encoders_of(self._pipeline).values()
        for encoder in encoders if compiled else ():
            compute_as_captured(encoder)
        return offload_layers(encoders, self._opened.models_device)

    def forget_copies(self) -> None:
        """Copy offloaded layers again at their next forwards: their device memory may lose its values."""
        for offload in self._offloads:
            offload.forget_copies()

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """The models with weights, of any part."""
        return modules_of(self._pipeline)

    def compile_calls(self) -> AbstractContextManager[None]:
        """Compile the encoders for the prompt lengths that are encoded inside the block."""
        return compile_calls(self._compiled)

    @torch.no_grad()
    def encode(self, request: MediaRequest, pictures: InputPictures = NO_PICTURES) -> Conditioning:
        request, *later = request.stages
        state, noise = self._encode(request, pictures)
        negative, avoided = None, request.negative_prompt
        is_guided = self._opened.spec.has_own_guidance or guiders_of(self._pipeline)
        if avoided is not None and request.true_cfg_scale > 1 and not is_guided:
            other, _ = self._encode(replace(request, prompt=avoided), pictures)
            negative = self._values(other)
        values = self._values(state)
        return Conditioning(
            values=values,
            kinds={kind: tuple(names) for kind, names in state.kwargs_mapping.items()},
            dtype=self._opened.dtype,
            negative=negative,
            noise=noise,
            later=self._later_values(later[0], pictures, values) if later and pictures.pictures else None,
        )

    def _later_values(
        self, request: MediaRequest, pictures: InputPictures, values: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Return what differs from ``values`` in a second pass: pictures in its size."""
        state, _ = self._encode(request, pictures)
        return {name: value for name, value in self._values(state).items() if not _equal(value, values.get(name))}

    def _encode(self, request: MediaRequest, pictures: InputPictures) -> tuple[PipelineState, NoiseState | None]:
        """Return the blocks' values, and the generator's state if they changed it."""
        set_scale(self._pipeline, max(request.true_cfg_scale, 2.0 if self._opened.spec.needs_negative else 1.0))
        if self._crops_pictures:
            pictures = pictures.cut_to(request.width, request.height)
        inputs = self._opened.inputs_of(request, pictures)
        if self._crops_pictures and RESIZES in self._opened.inputs:
            inputs[RESIZES] = False
        if self.max_tokens and LENGTH in self._opened.inputs:
            inputs[LENGTH] = self.max_tokens
            self._warn_if_truncated(request.prompt)
        elif self.max_tokens:
            inputs |= {name: self._truncate(inputs[name]) for name in PROMPTS if name in inputs}
        state = self._opened.state(inputs)
        if CONTROL_PICTURE in inputs and CONTROL_PICTURE in self._later_inputs:  # ranks read it, and get no pictures
            state.set(CONTROL_PICTURE, _pixels(inputs[CONTROL_PICTURE]))
        generator = inputs.get("generator")
        before = None if generator is None else NoiseState.of(generator)
        tree.run(self._opened.blocks, [(name,) for name in self._sections], self._pipeline, state)
        after = None if generator is None else NoiseState.of(generator)
        return state, None if before == after else after

    def _values(self, state: PipelineState) -> dict[str, Any]:
        """Return the encoding blocks' outputs that later blocks read."""
        blocks = [self._opened.blocks.sub_blocks[name] for name in self._sections]
        outputs = dict.fromkeys(output.name for block in blocks for output in block.intermediate_outputs)
        names = [name for name in (*outputs, CONTROL_PICTURE) if name in self._later_inputs]
        names = [name for name in names if state.get(name) is not None]
        return {name: on_cpu(state.get(name)) for name in names}

    def _truncate(self, prompt: str) -> str:
        """Return ``prompt`` up to the token limit; log a warning if it is truncated."""
        if not self._warn_if_truncated(prompt):
            return prompt
        places = self._tokenizer(prompt, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        return prompt[: places[: self.max_tokens][-1][1]]

    def _warn_if_truncated(self, prompt: str) -> bool:
        """Return whether ``prompt`` exceeds the token limit, and log a warning if so."""
        num_tokens = len(self._tokenizer(prompt)["input_ids"])
        if num_tokens > self.max_tokens:
            logger.warning("the prompt has %d tokens; the model sees the first %d", num_tokens, self.max_tokens)
        return num_tokens > self.max_tokens

    @property
    def _tokenizer(self) -> Any:
        """The tokenizer with the largest limit, which may be inside an image processor."""
        parts = [one for name in (*TOKENIZERS, "processor") if (one := getattr(self._pipeline, name, None)) is not None]
        return max((getattr(one, "tokenizer", one) for one in parts), key=lambda one: int(one.model_max_length))


def _pixels(image: Image) -> Tensor:
    """Return an RGB picture as (1, 3, height, width), from 0 to 1."""
    return torch.from_numpy(np.asarray(image, dtype=np.float32) / 255).permute(2, 0, 1)[None]


def _equal(one: Any, other: Any) -> bool:
    """Return whether two values, with the tensors in their lists and dicts, are equal."""
    (tensors, constants), (others, other_constants) = (arguments.split({"": value}) for value in (one, other))
    is_alike = tensors.keys() == others.keys() and constants == other_constants
    return is_alike and all(torch.equal(x, others[name]) for name, x in tensors.items())


def on_cpu(value: Any) -> Any:
    """Return ``value`` with the tensors in its lists and dicts on the CPU."""
    if isinstance(value, Tensor):
        return value.cpu()
    if isinstance(value, list | tuple):
        return type(value)(map(on_cpu, value))
    if isinstance(value, dict):
        return {name: on_cpu(inner) for name, inner in value.items()}
    return value


def on_device(value: Any, device: torch.device, dtypes: Mapping[torch.dtype, torch.dtype]) -> Any:
    """Return ``value`` with its tensors on ``device``, with dtypes converted by ``dtypes``."""
    if isinstance(value, Tensor):
        return value.to(device, dtypes.get(value.dtype, value.dtype))
    if isinstance(value, list | tuple):
        return type(value)(on_device(inner, device, dtypes) for inner in value)
    if isinstance(value, dict):
        return {name: on_device(inner, device, dtypes) for name, inner in value.items()}
    return value
