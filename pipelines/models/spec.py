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
from pipelines.directory import open_modular, read_config, read_index

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn

    from engines.core.attention import Kernel
    from engines.core.model import Arguments, ArrangeWeights, ModelInputs
    from engines.core.shard_plan import ShardPlan
    from pipelines.recipes import Recipe
    from pipelines.request import InputPictures, MediaRequest


def check_channels(path: Path, part: str, given: int) -> None:
    """Raise ValueError if a part takes another number of channels than the pipeline passes."""
    number = read_config(path, part).get("in_channels", given)
    if number != given:
        raise ValueError(
            f"the {part} of {path} takes {number} channels, and a {read_index(path).get('_class_name')} gives it "
            f"{given}: it was made for other inputs, such as masks or pictures; name the pipeline that it was "
            "published with in the folder's index, or take another model"
        )


def first_output(module: nn.Module, call: Mapping[str, Any]) -> Tensor:
    """Call a diffusers transformer and return the first tensor of its output."""
    prediction: Tensor = module(**call, return_dict=False)[0]
    return prediction


def blank_like(x: Tensor, shape: Sequence[int] | None = None) -> Tensor:
    """Return zeros that take no memory, by default in the shape of ``x``."""
    return x.new_zeros(()).expand(x.shape if shape is None else shape)


def scale_residual(residual: Tensor, scale: Tensor) -> Tensor:
    """Return a control network's ``residual`` times ``scale``, in its dtype, to which the scale is not rounded."""
    return (residual.float() * scale).to(residual.dtype)


Config = Mapping[str, Any]
"""A transformer's ``config.json``, with the defaults of its class.

"pipeline" holds the settings of its pipeline, and "control" the configuration of its control network, if it has one.
"""
CONTROL = "control"
FAST_EPS = 1e-6
"""Epsilon of the norms in hand-ordered steps (``engines.fast.records.EPS``), and of published models."""


@dataclass(frozen=True, slots=True)
class LazyFunction:
    """A function of another module, imported at its first call: spec files need no torch."""

    module: str
    """Full name of the module."""
    name: str
    """The function's name in it."""

    @property
    def target(self) -> Callable[..., Any]:
        return cast(Callable[..., Any], getattr(import_module(self.module), self.name))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.target(*args, **kwargs)


def lazy(path: str) -> Any:
    """Return the function at ``path`` ("module:function"), for use as a method of ``ModelSpec``."""
    module, name = path.split(":")
    return LazyFunction(module, name)


class ModelSpec(ABC):
    """How a transformer class is divided, called and guided. Stateless; a family overrides defaults.

    ``path`` is a diffusers folder, ``config`` its transformer's configuration. Only methods that say so need torch.
    """

    family: str
    """Name of the models that share the class, as users know them."""
    latents: str = LATENTS
    timestep: str = TIMESTEP
    """Names of the inputs that change with every step (``DenoiserModel``)."""
    local_attention: tuple[str, ...] = ()
    """Name patterns (``*`` for a number) of attentions whose keys every rank has whole."""
    counts_heads: bool = False
    """True if attention processors split features by ``heads``; a ``tensor`` rank holds only a share of them."""
    is_whole: bool = False
    """True if the pipeline's own ``__call__`` runs on a rank, from text encoder to decoder (``generic.whole``)."""
    has_known_conditioning: bool = True
    """True if ``blank_conditioning`` is implemented. If not, a gang warms up with its first request, unchecked."""
    reads_values: bool = False
    """True if the forward reads values of tensors on the host (``DenoiserModel``)."""
    dynamic_shapes: bool = False
    """True if steps of one size differ in the length of the prompt (``DenoiserModel``)."""
    makers_layers: Mapping[str, tuple[str, ...]] = {}
    """Names of layers in adapters, where diffusers has none or those of whole checkpoints. The first match counts."""
    hoisted: Callable[[nn.Module, Arguments], ModelInputs] | None = None
    """Compute inputs that no step changes, once a job (``DenoiserModel``)."""
    hoisted_inputs: tuple[str, ...] = ()
    """Inputs that ``hoisted`` reads, if branches of guidance share what it computes (``DenoiserModel``)."""
    num_hoisted: int = 2
    """Results of ``hoisted`` that a job with guidance needs (``DenoiserModel``)."""
    hoists_by_blocks: bool = False
    """True if ``hoisted`` finds the weights of offloaded blocks (``DenoiserModel``)."""
    latent_upsampler: Callable[..., Any] | None = None
    """Opens what enlarges latents for a second pass (``ltx2.upsampler``); None: the family makes clips in one."""
    latent_upsampler_bytes: Callable[..., int] | None = None
    """Returns the bytes of that part's weights, from its configuration and a dtype."""
    block_modules: tuple[str, ...] = ()
    """Submodules of the transformer, without weights, that diffusers' blocks use."""
    workflows: Mapping[str, tuple[str, ...]] = {}
    """Uses of a folder that need a model of their own (``pipelines.workflow``), each with the parts it leaves out."""
    control_part: str = ""
    """Part of the pipeline with a control network. It is a submodule of the transformer, whose ``forward`` calls it."""
    control_pipelines: tuple[str, ...] = ()
    """Pipelines with such a part that the modular blocks serve."""
    float32_parts: tuple[str, ...] = ()
    """Parts of the pipeline that are float32 whatever the transformer's dtype is."""
    rank_parts: tuple[str, ...] = ()
    """Parts that the blocks of some steps call on ranks, beside the transformers (``OpenedPipeline.rank_part``)."""
    short_prompts: tuple[int, ...] = ()
    """Lengths of prompts, in tokens, that a gang warms up beside the longest."""
    windowed_prompts: tuple[int, ...] = ()
    """Lengths that a gang warms up where its engine pads prompts."""
    fits_pictures: bool = False
    """True if pictures become frames of the clip, cut to its size."""
    reference_latents: str = ""
    """Name of encoded pictures and clips that are tokens of each step, for estimates; empty: none, or in the prompt."""
    has_video_values: bool = False
    """True if requests without a clip have values in its place (``blank_video``)."""
    needs_negative: bool = False
    """True if the blocks fail without a negative prompt, even if no guider looks at it."""
    has_own_guidance: bool = False
    """True if the blocks handle a second prompt without a guider."""
    decodes_frames_apart: bool = False
    """True if decoding blocks treat each frame alone, after the auto-encoder."""
    eager_only: str = ""
    """Why the forward cannot be exported from torch: text that follows the class name in a message."""
    eager_split: str = ""
    """The same, if ranks share the tokens."""
    schedulers: tuple[str, ...] = ()
    """Schedulers (``pipelines.solver``) that requests may name; none: the solver is fixed."""
    shifts_schedule: bool = False
    """True if requests may shift the schedule of a scheduler without such a name."""
    schedules: tuple[str, ...] = ()
    """Schedules that the blocks take: ``sigmas``, ``timesteps``."""
    latent_channels: tuple[str, ...] = ()
    """Keys of the configuration, the first of which that is set counts the channels of a latent; none: not checked."""
    latents_per_channels: int = 1
    """Latents whose channels those keys count together, if tokens are packed squares."""
    plan: ShardPlan
    """The shard plan of all configurations, unless ``shard_plan`` is overridden."""
    arrange_fast: ArrangeWeights | None = None
    """Arranges weights for a hand-ordered step; None if the class has none."""

    @abstractmethod
    def defaults(self, path: Path) -> Defaults:
        """Return the values for fields that a request omits. ValueError for a checkpoint that cannot be served."""

    def recipes(self, path: Path) -> Mapping[str, Recipe]:
        """Return the published recipes for a checkpoint, by name. Their adapters are the user's."""
        return {}

    def unused_parts(self, path: Path) -> tuple[str, ...]:
        """Return the parts of the folder that no request needs; they are not loaded."""
        return ()

    def shard_plan(self, config: Config) -> ShardPlan:
        """Return how the transformer is split."""
        return self.plan

    @abstractmethod
    def stream_lengths(self, config: Config, arguments: Arguments) -> Mapping[str, int]:
        """Return the number of tokens of each stream in a call with ``arguments``."""

    def hoisted_features(self, config: Config) -> Mapping[str, int]:
        """Return how many numbers ``hoisted`` leaves for each token of a stream, by stream (``DenoiserModel``)."""
        return {}

    def hoisted_numbers(self, config: Config) -> int:
        """Return how many numbers ``hoisted`` leaves for the longest prompt, if no stream has its tokens alone."""
        return 0

    def heads(self, config: Config) -> tuple[int, int]:
        """Return number and dim of the heads of self-attention."""
        return config["num_attention_heads"], config["attention_head_dim"]

    def blank_conditioning(self, config: Config, num_tokens: int) -> Mapping[str, Any]:
        """Return zeros in the shapes of an encoded prompt of ``num_tokens``. Needs torch."""
        raise ValueError(f"the conditioning of {self.family} is not known before there is a request")

    def blank_pictures(self, path: Path, request: MediaRequest) -> Mapping[str, Any]:
        """Return zeros in the shapes of a request's encoded pictures and control picture. Needs torch."""
        return {}

    def blank_video(self, path: Path, request: MediaRequest) -> Mapping[str, Any]:
        """Return zeros in the shapes of a request's encoded clip, if it adds tokens to a step. Needs torch."""
        return {}

    def control_residuals(self, call: Mapping[str, Any]) -> Any:
        """Return what stands for the residuals of a control network's ``call`` in that of the transformer."""
        return call

    def adapt_call(self, config: Config, call: Mapping[str, Any], step: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the blocks' ``call`` in the form for the engine. ``step``: inputs of the step's blocks."""
        return call

    def blank_prediction(self, config: Config, call: Mapping[str, Any]) -> Any:
        """Return a placeholder for the output of ``call``, in its shapes. Needs torch."""
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

        self.replace_processors(module)
        attention.set_kernel(module, kernel, local=self.local_attention)
        if self.counts_heads:
            attention.count_heads(module)

    def replace_processors(self, module: nn.Module) -> None:  # noqa: B027  most families need none
        """Replace diffusers' processors of attention by extended ones. Needs torch."""

    def fast_weights(self, config: Config) -> ArrangeWeights | None:
        """Return ``arrange_fast``, or None if the hand-ordered step does not support ``config``.

        Its fused norms have one epsilon.
        """
        return self.arrange_fast if config.get("eps", FAST_EPS) == FAST_EPS else None

    def check_latents(self, config: Config, vae: Mapping[str, Any], path: Path) -> None:
        """Raise ValueError if the auto-encoder has latents of other channels than the transformer. Unset ones fit."""
        given = next((config[key] for key in self.latent_channels if config.get(key)), 0) // self.latents_per_channels
        number = vae.get("z_dim") or vae.get("latent_channels") or given
        if given and number != given:
            raise ValueError(
                f"the vae of {path}, an {vae.get('_class_name')}, makes {number} channels of latents, and the "
                f"transformer takes {given}: take the model's own auto-encoder, or a tiny one that was made for it"
            )

    def auto_encoder(self, path: Path) -> Any:
        """Return the type of the ``vae`` that the pipeline takes, None if it names none. Needs torch."""
        return {one.name: one.type_hint for one in open_modular(path).blocks.expected_components}.get("vae")

    def patch_blocks(self, blocks: Any) -> None:  # noqa: B027  most families need no patch
        """Replace faulty blocks of diffusers, and add missing ones. Needs torch."""

    def extend_blocks(self, blocks: Any, path: Path) -> None:  # noqa: B027  as above
        """Replace or add blocks for the settings of one checkpoint. Needs torch."""

    def complete_pipeline(self, pipeline: Any) -> None:  # noqa: B027  as above
        """Add parts that no folder holds to a pipeline that encodes or decodes, and patch others."""

    def pipeline_inputs(self, path: Path, request: MediaRequest) -> Mapping[str, Any]:
        """Return pipeline inputs that are no request field of the same name."""
        return {}

    def place_pictures(self, path: Path, request: MediaRequest, pictures: InputPictures) -> Mapping[str, Any]:
        """Return pipeline inputs that say where in the clip the pictures are; empty: they are its ``image``.

        An input clip may be among these inputs too.
        """
        return {}

    def pad_conditioning(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return encoded values as every step reads them. Needs torch.

        Prompts padded to shared lengths share a captured step. A cast by the loop's blocks makes new tensors at each
        step, for which an engine computes anew what it hoists.
        """
        return values

    def first_frame(self, config: Config, latents: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the entries of ``latents`` that differ if only the clip's first frame is decoded."""
        return {}

    def estimate_final(self, loop_state: Any, sigma: float) -> Mapping[str, Tensor] | None:
        """Return the final latents that a step predicts (flow matching: ``x - sigma * v``); None if unknown yet."""
        velocity, latents = getattr(loop_state, "noise_pred", None), loop_state.latents
        return None if velocity is None else {"latents": (latents.float() - sigma * velocity.float()).to(latents.dtype)}

    def finished_chunk(self, loop_state: Any) -> Mapping[str, Any]:
        """Return what a preview shows between two chunks of a clip, since the next one is noise; empty: no chunks."""
        return {}

    def round_values(self, loop_state: Any, call: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return intermediate values of a loop with several steps a round. Needs torch."""
        return {}


class TextAndImageSpec(ModelSpec):
    """Transformers with a stream of text and one of pictures, both passed as tokens."""

    def stream_lengths(self, config: Config, arguments: Arguments) -> Mapping[str, int]:
        return {"text": arguments["encoder_hidden_states"].shape[1], "image": arguments["hidden_states"].shape[1]}


class SeveralOutputsSpec(ModelSpec):
    """Transformers with several outputs, which engines see as one tensor, (B, all values)."""

    def forward(self, module: nn.Module, call: Mapping[str, Any]) -> Tensor:
        import torch

        return torch.cat([output.flatten(1) for output in self.outputs(module, call)], dim=1)

    def outputs(self, module: nn.Module, call: Mapping[str, Any]) -> tuple[Tensor, ...]:
        """Return the transformer's outputs. Needs torch."""
        outputs: tuple[Tensor, ...] = module(**call, return_dict=False)
        return outputs

    def to_output(self, config: Config, call: Mapping[str, Any], prediction: Tensor) -> tuple[Tensor, ...]:
        import torch

        blanks = self.blank_prediction(config, call)
        parts = torch.split(prediction, [blank[0].numel() for blank in blanks], dim=1)
        return tuple(part.reshape(blank.shape) for part, blank in zip(parts, blanks, strict=True))


def first_latent_frame(_spec: ModelSpec, config: Config, latents: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return, as ``first_frame``, the latents that a causal auto-encoder decodes to one frame."""
    return {"latents": latents["latents"][:, :, :1]}


def fewer_channels(_spec: ModelSpec, config: Config, call: Mapping[str, Any]) -> tuple[Tensor]:
    """Return a ``blank_prediction`` with fewer channels than the input, which also holds a picture."""
    latents = call["hidden_states"]
    return (blank_like(latents, (latents.shape[0], config["out_channels"], *latents.shape[2:])),)


def num_patches(sizes: Iterable[int], patch: Iterable[int]) -> int:
    """Return the number of patches of latents of ``sizes``, such as (frames, rows, columns)."""
    return math.prod(size // side for size, side in zip(sizes, patch, strict=True))


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
    """Return ``base`` for its distilled model: fewer steps, and no second prompt."""
    return replace(base, num_inference_steps=num_inference_steps, true_cfg_scale=1.0)
