"""What the project must know of a transformer class to divide it: the form that every file of a class fills in."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engines.core.model import LATENTS, TIMESTEP
from engines.core.shard_plan import ShardPlan
from pipelines.defaults import Defaults
from pipelines.models.predictions import first_output, like_latents, whole
from pipelines.request import MediaRequest

if TYPE_CHECKING:
    from torch import Tensor, nn

    from engines.core.fast_model import ArrangeWeights
    from engines.core.kernel import Kernel
    from engines.core.model import Arguments, ModelInputs

Config = Mapping[str, Any]
"""A transformer's ``config.json``, with the defaults of its class."""


def attention_heads(config: Config) -> tuple[int, int]:
    """Their number and their dim, as most classes write them."""
    return config["num_attention_heads"], config["attention_head_dim"]


def text_and_image(config: Config, arguments: Arguments) -> dict[str, int]:
    """The tokens of a prompt and of a picture that is called with as tokens."""
    return {"text": arguments["encoder_hidden_states"].shape[1], "image": arguments["hidden_states"].shape[1]}


def num_patches(sizes: Iterable[int], patch: Iterable[int]) -> int:
    """The tokens of latents of these sizes, such as (frames, rows, columns), each of which is a ``patch`` of them."""
    return math.prod(size // side for size, side in zip(sizes, patch, strict=True))


def along_velocity(loop_state: Any, sigma: float) -> Mapping[str, Tensor] | None:
    """Flow matching tells the finished latents from where a step ended, ``x - sigma * v``."""
    velocity, latents = getattr(loop_state, "noise_pred", None), loop_state.latents
    return None if velocity is None else {"latents": (latents.float() - sigma * velocity.float()).to(latents.dtype)}


def unchanged(config: Config, call: Mapping[str, Any], step: Mapping[str, Any]) -> Mapping[str, Any]:
    return call


def without_prompt_mask(config: Config, call: Mapping[str, Any], step: Mapping[str, Any]) -> Mapping[str, Any]:
    """One prompt is as long as it is: its mask, which masks nothing, would only forbid the fastest attention."""
    return {name: value for name, value in call.items() if name != "encoder_hidden_states_mask"}


def first_latent_frame(config: Config, latents: Mapping[str, Any]) -> Mapping[str, Any]:
    """Of ``latents_BCTHW``, the part that a causal auto-encoder decodes to one frame."""
    return {"latents": latents["latents"][:, :, :1]}


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """One transformer class, of the models that people know as ``family``.

    A class of diffusers that has no file here gets one made up (``generic``): divided by diffusers' own plan where it
    has one, else whole, on one rank a gang.

    ``defaults(folder)`` are what the model does when nobody says otherwise; they are read without torch. Of a
    transformer with a ``config``, in which ``config["pipeline"]`` are the settings of the pipeline around it:

    - ``shard_plan(config)`` says how it is split; ``stream_lengths(config, arguments)`` gives the tokens of its
      streams; ``heads(config)`` the number and the dim of its self-attention's heads. ``local_attention`` are name
      patterns (``*`` for a number) of attentions whose keys every rank has whole.
    - ``blank_conditioning(config, num_tokens)`` are zeros in the shapes of what the encoders make of a prompt. None
      where that is not known: a gang is then warm after its first request, and has no known step to check itself with.
    - ``adapted(config, call, step)`` is a call of it where blocks and transformer differ; ``step`` is what the step's
      blocks were called with. ``blank(config, call)`` is what the pipeline may take for the answer before there is one;
      ``forward(module, call)`` makes the call and gives one tensor, and ``answer(config, call, prediction)`` makes of
      that what the pipeline expects.
    - ``set_kernel``: where diffusers' attention dispatcher does not do. ``hoisted``, ``reads_values``, ``latents`` and
      ``timestep`` as in ``DenoiserModel``; ``fast(config)`` is its ``fast``, None where the transformer has no
      hand-ordered step.

    ``used_by_blocks`` are its submodules, without weights, that diffusers' blocks use.
    ``blank_pictures(folder, request)`` are values in the shapes of what the encoders make of a request's pictures.
    With ``frames_from_pictures``, these are frames of the clip, and cut to its size. ``mend(blocks)`` replaces blocks
    of diffusers' that are faulty, and adds what they lack; ``extend(blocks, folder)`` does so for the settings of one
    checkpoint.

    ``first_frame(config, latents)`` are the latents that a clip's first frame needs. ``estimate(loop_state, sigma)``
    are the finished latents as a step's values tell them, None before there are any; ``in_round(loop_state, call)``
    are values that show how far a loop of several steps a round has come. ``float32_parts`` of the pipeline
    are float32 whatever the transformer is. ``frames_apart``: its decoding blocks do with a frame what they would do
    with it alone, after the auto-encoder. ``needs_negative``: its blocks fail without a negative prompt, even where
    no guider looks at it. ``guides_itself``: its blocks know a second prompt without a guider.

    ``filled(values)`` are what the encoders made of a prompt, at a length that other prompts have too: steps of one
    shape share what is captured for them. ``short_prompts`` are such lengths that a gang prepares beside the longest;
    ``windowed_prompts`` those that it prepares where its engine fills prompts up.

    ``inputs(folder, request)`` are the pipeline's inputs that a request decides otherwise than by their names.
    ``idle_parts`` are transformers of the folder that no request needs, and nobody loads.
    ``eager_only`` says why its forward becomes no graph outside torch (as TensorRT needs it): a verb and what follows
    it, where the subject is the class; ``eager_split`` why it does not where ranks share the tokens. Or empty.
    ``complete(pipeline)`` adds parts that are in no folder to a pipeline that encodes or decodes, and mends others.
    """

    family: str
    defaults: Callable[[Path], Defaults]
    shard_plan: Callable[[Config], ShardPlan]
    stream_lengths: Callable[[Config, Arguments], Mapping[str, int]]
    heads: Callable[[Config], tuple[int, int]] = attention_heads
    blank_conditioning: Callable[[Config, int], Mapping[str, Any]] | None
    local_attention: tuple[str, ...] = ()
    adapted: Callable[[Config, Mapping[str, Any], Mapping[str, Any]], Mapping[str, Any]] = unchanged
    blank: Callable[[Config, Mapping[str, Any]], Any] = like_latents
    forward: Callable[[nn.Module, Mapping[str, Any]], Tensor] = first_output
    answer: Callable[[Config, Mapping[str, Any], Tensor], Any] = whole
    used_by_blocks: tuple[str, ...] = ()
    blank_pictures: Callable[[Path, MediaRequest], Mapping[str, Tensor]] | None = None
    frames_from_pictures: bool = False
    mend: Callable[[Any], None] | None = None
    extend: Callable[[Any, Path], None] = lambda blocks, folder: None
    set_kernel: Callable[[nn.Module, Kernel], None] | None = None
    hoisted: Callable[[nn.Module, Arguments], ModelInputs] | None = None
    reads_values: bool = False
    fast: Callable[[Config], ArrangeWeights | None] = lambda config: None
    latents: str = LATENTS
    timestep: str = TIMESTEP
    estimate: Callable[[Any, float], Mapping[str, Tensor] | None] = along_velocity
    in_round: Callable[[Any, Mapping[str, Any]], Mapping[str, Any]] = lambda loop_state, call: {}
    first_frame: Callable[[Config, Mapping[str, Any]], Mapping[str, Any]] | None = None
    float32_parts: tuple[str, ...] = ()
    filled: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda values: values
    short_prompts: tuple[int, ...] = ()
    windowed_prompts: tuple[int, ...] = ()
    needs_negative: bool = False
    guides_itself: bool = False
    frames_apart: bool = False
    inputs: Callable[[Path, MediaRequest], Mapping[str, Any]] = lambda folder, request: {}
    idle_parts: tuple[str, ...] = ()
    eager_only: str = ""
    eager_split: str = ""
    complete: Callable[[Any], None] = lambda pipeline: None
