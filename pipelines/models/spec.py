"""Everything Troupe knows about one transformer class of diffusers: ``ModelSpec``, which every family subclasses."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from engines.core.model import LATENTS, TIMESTEP
from pipelines.defaults import Defaults
from pipelines.directory import read_config, read_index

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn

    from engines.core.attention import Kernel
    from engines.core.model import Arguments, ArrangeWeights, ModelInputs
    from engines.core.shard_plan import ShardPlan
    from pipelines.request import MediaRequest


def check_channels(path: Path, part: str, given: int, taken: int | None = None) -> None:
    """ValueError if the part's configuration says another number of ``in_channels`` than the pipeline has for it.

    ``taken`` is that number where the configuration calls it otherwise.
    """
    number = read_config(path, part).get("in_channels", given) if taken is None else taken
    if number != given:
        raise ValueError(
            f"the {part} of {path} takes {number} channels, and a {read_index(path).get('_class_name')} gives it "
            f"{given}: it was made for other inputs, such as masks or pictures; name the pipeline that it was "
            "published with in the folder's index, or take another model"
        )


def first_output(module: nn.Module, call: Mapping[str, Any]) -> Tensor:
    """Calls a diffusers transformer; returns the first tensor of its output."""
    prediction: Tensor = module(**call, return_dict=False)[0]
    return prediction


def all_outputs(module: nn.Module, call: Mapping[str, Any]) -> Tensor:
    """Calls a diffusers transformer; returns the tensors of its output one after the other, (B, all values)."""
    import torch

    return torch.cat([output.flatten(1) for output in module(**call, return_dict=False)], dim=1)


def parted(prediction: Tensor, blanks: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Returns the tensors that ``all_outputs`` put together, in the shapes of ``blanks``."""
    import torch

    parts = torch.split(prediction, [blank[0].numel() for blank in blanks], dim=1)
    return tuple(part.reshape(blank.shape) for part, blank in zip(parts, blanks, strict=True))


def blank_like(x: Tensor, shape: Sequence[int] | None = None) -> Tensor:
    """Returns zeros that take no memory, in the shape of ``x`` unless another is given."""
    return x.new_zeros(()).expand(x.shape if shape is None else shape)


def of_fewer_channels(config: Mapping[str, Any], call: Mapping[str, Any]) -> tuple[Tensor]:
    """A blank prediction of a model that takes more channels than it predicts: beside latents those of a picture."""
    latents = call["hidden_states"]
    return (blank_like(latents, (latents.shape[0], config["out_channels"], *latents.shape[2:])),)


Config = Mapping[str, Any]
"""A transformer's ``config.json``, with the defaults of its class; "pipeline" holds the settings of its pipeline."""


@dataclass(frozen=True, slots=True)
class LazyFunction:
    """A function of another module, imported when it is called first: spec files need no torch."""

    module: str
    name: str

    @property
    def target(self) -> Callable[..., Any]:
        return cast(Callable[..., Any], getattr(import_module(self.module), self.name))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.target(*args, **kwargs)


def lazy(path: str) -> Any:
    """Return the function at ``path`` ("module:function"), which takes the place of a method of ``ModelSpec``."""
    module, name = path.split(":")
    return LazyFunction(module, name)


class ModelSpec(ABC):
    """How a transformer class is divided, called and guided. Stateless; a family overrides what differs.

    A class of diffusers without a family here gets ``generic.spec.GenericSpec``. ``path`` is a diffusers folder,
    ``config`` its transformer's configuration. Only methods that say so need torch.
    """

    family: str
    """Name of the models that share the class, as users know them."""
    latents: str = LATENTS
    timestep: str = TIMESTEP
    """Names of the inputs that change with every step (``DenoiserModel``)."""
    local_attention: tuple[str, ...] = ()
    """Name patterns (``*`` for a number) of attentions whose keys every rank has whole."""
    counts_heads: bool = False
    """Whether its attention processors split features by ``heads``, of which a rank of ``tensor`` holds a share."""
    has_known_conditioning: bool = True
    """Whether ``blank_conditioning`` is implemented. If not, a gang is warm only after its first request, and has no
    known step for its self-check."""
    reads_values: bool = False
    """Whether the forward reads values of tensors on the host (``DenoiserModel``)."""
    hoisted: Callable[[nn.Module, Arguments], ModelInputs] | None = None
    """Compute inputs that no step changes, once a job (``DenoiserModel``)."""
    block_modules: tuple[str, ...] = ()
    """Submodules of the transformer, without weights, that diffusers' blocks use."""
    unused_parts: tuple[str, ...] = ()
    """Transformers of the folder that no request needs; they are not loaded."""
    float32_parts: tuple[str, ...] = ()
    """Parts of the pipeline that are float32 whatever the transformer's dtype is."""
    short_prompts: tuple[int, ...] = ()
    """Lengths of prompts, in tokens, that a gang warms up beside the longest."""
    windowed_prompts: tuple[int, ...] = ()
    """Lengths that a gang warms up where its engine pads prompts."""
    fits_pictures: bool = False
    """Whether pictures become frames of the clip, cut to its size."""
    needs_negative: bool = False
    """Whether the blocks fail without a negative prompt, even if no guider looks at it."""
    has_own_guidance: bool = False
    """Whether the blocks handle a second prompt without a guider."""
    decodes_frames_apart: bool = False
    """Whether decoding blocks treat each frame alone, after the auto-encoder."""
    eager_only: str = ""
    """Why the forward becomes no graph outside torch: a verb and what follows, the class being the subject."""
    eager_split: str = ""
    """The same where ranks share the tokens."""

    @abstractmethod
    def defaults(self, path: Path) -> Defaults:
        """Return what the model does when a request does not say. ValueError for a checkpoint that cannot be served."""

    @abstractmethod
    def shard_plan(self, config: Config) -> ShardPlan:
        """Return how the transformer is split."""

    @abstractmethod
    def stream_lengths(self, config: Config, arguments: Arguments) -> Mapping[str, int]:
        """Return the number of tokens of each stream in a call with ``arguments``."""

    def heads(self, config: Config) -> tuple[int, int]:
        """Return number and dim of the heads of self-attention."""
        return config["num_attention_heads"], config["attention_head_dim"]

    def blank_conditioning(self, config: Config, num_tokens: int) -> Mapping[str, Any]:
        """Return zeros in the shapes of an encoded prompt of ``num_tokens``. Needs torch."""
        raise ValueError(f"the conditioning of {self.family} is not known before there is a request")

    def blank_pictures(self, path: Path, request: MediaRequest) -> Mapping[str, Any]:
        """Return zeros in the shapes of a request's encoded pictures. Needs torch."""
        return {}

    def adapt_call(self, config: Config, call: Mapping[str, Any], step: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return ``call``, made by the blocks, as the engine makes it. ``step``: inputs of the step's blocks."""
        return call

    def blank_prediction(self, config: Config, call: Mapping[str, Any]) -> Any:
        """Return what the pipeline may take for the output of ``call`` before it is computed. Needs torch."""
        return (blank_like(call["hidden_states"]),)

    def forward(self, module: nn.Module, call: Mapping[str, Any]) -> Tensor:
        """Return the prediction as one tensor. Needs torch."""
        return first_output(module, call)

    def to_output(self, config: Config, call: Mapping[str, Any], prediction: Tensor) -> Any:
        """Return ``prediction`` in the form that the pipeline expects of the transformer."""
        return (prediction,)

    def set_kernel(self, module: nn.Module, kernel: Kernel) -> None:
        """Make self-attention inside ``module`` call ``kernel``: through diffusers' dispatcher. Needs torch."""
        from pipelines.blocks import attention

        attention.set_kernel(module, kernel, local=self.local_attention)
        if self.counts_heads:
            attention.count_heads(module)

    def fast_weights(self, config: Config) -> ArrangeWeights | None:
        """Return the function that arranges weights for a hand-ordered step; None if the transformer has none."""
        return None

    def patch_blocks(self, blocks: Any) -> None:  # noqa: B027  most families need no patch
        """Replace faulty blocks of diffusers, and add missing ones. Needs torch."""

    def extend_blocks(self, blocks: Any, path: Path) -> None:  # noqa: B027  as above
        """Replace or add blocks for the settings of one checkpoint. Needs torch."""

    def complete_pipeline(self, pipeline: Any) -> None:  # noqa: B027  as above
        """Add parts that are in no folder to a pipeline that encodes or decodes, and patch others."""

    def pipeline_inputs(self, path: Path, request: MediaRequest) -> Mapping[str, Any]:
        """Return inputs of the pipeline that a request does not decide by their names."""
        return {}

    def pad_conditioning(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return encoded prompts at lengths that others share: one captured step serves all of them. Needs torch."""
        return values

    def first_frame(self, config: Config, latents: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the entries of ``latents`` that differ if only the clip's first frame is decoded."""
        return {}

    def estimate_final(self, loop_state: Any, sigma: float) -> Mapping[str, Tensor] | None:
        """Return the final latents that a step predicts (flow matching: ``x - sigma * v``); None if unknown yet."""
        velocity, latents = getattr(loop_state, "noise_pred", None), loop_state.latents
        return None if velocity is None else {"latents": (latents.float() - sigma * velocity.float()).to(latents.dtype)}

    def round_values(self, loop_state: Any, call: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return values that show how far a loop with several steps a round has come. Needs torch."""
        return {}


def text_and_image(arguments: Arguments) -> dict[str, int]:
    """Return the tokens of a prompt and of a picture that is passed as tokens."""
    return {"text": arguments["encoder_hidden_states"].shape[1], "image": arguments["hidden_states"].shape[1]}


def num_patches(sizes: Iterable[int], patch: Iterable[int]) -> int:
    """Return the tokens of latents of ``sizes``, such as (frames, rows, columns), cut into patches."""
    return math.prod(size // side for size, side in zip(sizes, patch, strict=True))


def without_prompt_mask(call: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return ``call`` without the mask of its one prompt: it masks nothing, and would forbid the fastest attention."""
    return {name: value for name, value in call.items() if name != "encoder_hidden_states_mask"}


def first_latent_frame(latents: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of ``latents_BCTHW`` that a causal auto-encoder decodes to one frame."""
    return {"latents": latents["latents"][:, :, :1]}


PICTURE = Defaults(
    kind="image",
    width=1024,
    height=1024,
    num_frames=1,
    fps=0,
    num_inference_steps=50,
    guidance_scale=0.0,
    true_cfg_scale=1.0,
    size_multiple=16,
    frame_multiple=1,
    max_pixels=2048 * 2048,
    max_frames=1,
    max_steps=100,
)
CLIP = Defaults(
    kind="video",
    width=1280,
    height=720,
    num_frames=121,
    fps=24,
    num_inference_steps=50,
    guidance_scale=0.0,
    true_cfg_scale=5.0,
    size_multiple=16,
    frame_multiple=4,
    max_pixels=1280 * 720,
    max_frames=121,
    max_steps=100,
)


def distilled(base: Defaults, num_inference_steps: int) -> Defaults:
    """Those of a model that does in so few steps, and without a second prompt, what ``base`` does."""
    return replace(base, num_inference_steps=num_inference_steps, true_cfg_scale=1.0)
