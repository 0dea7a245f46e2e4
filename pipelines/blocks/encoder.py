"""A request's words and pictures to conditioning, by a pipeline's encoding blocks."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from diffusers.modular_pipelines.modular_pipeline import PipelineState
from torch import Tensor

from engines.core.transport.parcel import Shapes
from pipelines.blocks import arguments, tree
from pipelines.blocks.compilation import compile_calls, compile_encoders
from pipelines.blocks.guidance import guiders_of, set_scale
from pipelines.blocks.noise import NoiseState
from pipelines.blocks.opened import TOKENIZERS, OpenedPipeline
from pipelines.pictures import NO_PICTURES, InputPictures
from pipelines.request import MediaRequest

logger = logging.getLogger(__name__)

LENGTH = "max_sequence_length"
"""The input by which blocks cut prompts to so many tokens. Blocks without it take all that comes."""
PROMPTS = ("prompt", "negative_prompt")
RESIZES = "_auto_resize"
"""The input by which blocks bring pictures to the sizes of the model as published."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Conditioning:
    """What the encoders made of a request: values by the names that the blocks after them read, tensors on the CPU.

    ``kinds`` are the names of the groups that values belong to. ``negative`` are those of the negative prompt, where
    the pipeline itself knows no second prompt. ``noise`` is where its generator stands, if an encoder drew from it.
    ``dtype`` is what the encoders compute in.
    """

    values: Mapping[str, Any]
    kinds: Mapping[str, tuple[str, ...]]
    dtype: torch.dtype
    negative: Mapping[str, Any] | None = None
    noise: NoiseState | None = None

    @property
    def shapes(self) -> Shapes:
        """The shapes of the tensors that jobs compute with."""
        tensors, _ = arguments.split({**self.values, "negative": self.negative})
        return tuple(sorted((name, tuple(x.shape)) for name, x in tensors.items()))


class BlocksEncoder:
    """Encodes one request at a time: tokenizers keep the padding of their last call. At most ``max_tokens`` of a prompt
    are seen (0: as the pipeline's blocks have it). With ``fits_pictures`` (``Defaults``), pictures come in the
    request's size. ``compiled``: prompt lengths that are encoded inside ``compile_calls`` run compiled."""

    def __init__(
        self, opened: OpenedPipeline, max_tokens: int = 0, *, fits_pictures: bool = False, compiled: bool = False
    ) -> None:
        self._opened = opened
        self._cuts_pictures = fits_pictures or opened.spec.fits_pictures
        self._sections = opened.sections.encode
        self._pipeline = opened.load(self._sections)
        self._compiled = compile_encoders(self._pipeline) if compiled else ()
        self._later = opened.input_names((opened.sections.denoise, *opened.sections.decode))
        self.max_tokens = opened.max_tokens(max_tokens)

    def compile_calls(self) -> AbstractContextManager[None]:
        """Compile the encoders for the prompt lengths that are encoded inside the block."""
        return compile_calls(self._compiled)

    @torch.no_grad()
    def encode(self, request: MediaRequest, pictures: InputPictures = NO_PICTURES) -> Conditioning:
        state, noise = self._encoded(request, pictures)
        negative = None
        if request.true_cfg_scale > 1 and not self._guides_itself():
            other, _ = self._encoded(replace(request, prompt=request.negative_prompt or ""), pictures)
            negative = self._values(other)
        return Conditioning(
            values=self._values(state),
            kinds={kind: tuple(names) for kind, names in state.kwargs_mapping.items()},
            dtype=self._opened.dtype,
            negative=negative,
            noise=noise,
        )

    def _encoded(self, request: MediaRequest, pictures: InputPictures) -> tuple[PipelineState, NoiseState | None]:
        """The blocks' values, and where the generator stands unless that is where its seed puts it."""
        set_scale(self._pipeline, max(request.true_cfg_scale, 2.0 if self._opened.spec.needs_negative else 1.0))
        if self._cuts_pictures:
            pictures = pictures.cut_to(request.width, request.height)
        inputs = self._opened.inputs_of(request, pictures)
        if self._cuts_pictures and RESIZES in self._opened.inputs:
            inputs[RESIZES] = False
        if self.max_tokens and LENGTH in self._opened.inputs:
            inputs[LENGTH] = self.max_tokens
            self._warn_if_cut(request.prompt)
        elif self.max_tokens:
            inputs |= {name: self._beginning(inputs[name]) for name in PROMPTS if name in inputs}
        state = self._opened.state(inputs)
        generator = inputs.get("generator")
        before = None if generator is None else NoiseState.of(generator)
        tree.run(self._opened.blocks, [(name,) for name in self._sections], self._pipeline, state)
        after = None if generator is None else NoiseState.of(generator)
        return state, None if before == after else after

    def _guides_itself(self) -> bool:
        return self._opened.spec.has_own_guidance or bool(guiders_of(self._pipeline))

    def _values(self, state: PipelineState) -> dict[str, Any]:
        """What the encoding blocks made and others read; not what a request says anyway."""
        blocks = [self._opened.blocks.sub_blocks[name] for name in self._sections]
        made = dict.fromkeys(output.name for block in blocks for output in block.intermediate_outputs)
        names = [name for name in made if name in self._later and state.get(name) is not None]
        return {name: on_cpu(state.get(name)) for name in names}

    def _beginning(self, prompt: str) -> str:
        """The part of ``prompt`` that the model sees. Logs that there is more."""
        if not self._warn_if_cut(prompt):
            return prompt
        places = self._tokenizer(prompt, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        return prompt[: places[: self.max_tokens][-1][1]]

    def _warn_if_cut(self, prompt: str) -> bool:
        """Whether ``prompt`` has tokens that the model will not see, which the log says then."""
        num_given = len(self._tokenizer(prompt)["input_ids"])
        if num_given > self.max_tokens:
            logger.warning("the prompt has %d tokens; the model sees the first %d", num_given, self.max_tokens)
        return num_given > self.max_tokens

    @property
    def _tokenizer(self) -> Any:
        """The one that gives the most tokens; it may be inside a processor of pictures."""
        parts = [one for name in (*TOKENIZERS, "processor") if (one := getattr(self._pipeline, name, None)) is not None]
        return max((getattr(one, "tokenizer", one) for one in parts), key=lambda one: int(one.model_max_length))


def on_cpu(value: Any) -> Any:
    """``value`` with the tensors in its lists and dicts on the CPU."""
    if isinstance(value, Tensor):
        return value.cpu()
    if isinstance(value, list | tuple):
        return type(value)(map(on_cpu, value))
    if isinstance(value, dict):
        return {name: on_cpu(inner) for name, inner in value.items()}
    return value


def on_device(value: Any, device: torch.device, dtypes: Mapping[torch.dtype, torch.dtype]) -> Any:
    """``value`` with the tensors in its lists and dicts on ``device``, those of the dtypes in ``dtypes`` converted."""
    if isinstance(value, Tensor):
        return value.to(device, dtypes.get(value.dtype, value.dtype))
    if isinstance(value, list | tuple):
        return type(value)(on_device(inner, device, dtypes) for inner in value)
    if isinstance(value, dict):
        return {name: on_device(inner, device, dtypes) for name, inner in value.items()}
    return value
