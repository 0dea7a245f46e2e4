"""A checkpoint's modular pipeline: blocks and small parts are loaded at once, weights on demand."""

from __future__ import annotations

import copy
import inspect
import json
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from weakref import proxy

import numpy as np
import torch
from accelerate import init_empty_weights  # type: ignore[import-untyped]
from diffusers import ModelMixin
from diffusers.configuration_utils import FrozenDict
from diffusers.models.modeling_utils import no_init_weights
from diffusers.modular_pipelines.modular_pipeline import PipelineState
from PIL.Image import Image
from torch import nn

from engines.core.logs import timed
from engines.parallel.collectives import Axis
from engines.parallel.mesh import ALONE
from engines.parallel.weight_files import files_of
from engines.quantization.linear import move_from_host
from pipelines.blocks.offloaded_layers import ENCODERS
from pipelines.blocks.recording_transformer import RecordingTransformer
from pipelines.blocks.tree import Sections
from pipelines.component_weights import check_finite, file_of, has_scales, load_folder
from pipelines.directory import (
    U_NET,
    lone_file,
    open_modular,
    part_class,
    part_folder,
    quantiser_of,
    read_config,
    read_index,
)
from pipelines.gpu_weights import fill, move_buffers
from pipelines.models.registry import load_spec
from pipelines.models.spec import CONTROL, ModelSpec
from pipelines.request import NO_PICTURES, InputPicture, InputPictures, MediaRequest
from pipelines.single_file import cast_like_diffusers, check_base, has_part, load_part, load_single_file

WeightsOnHost = Callable[[nn.Module], Collection[str]]
"""Returns the names of the weights of a transformer that stay on the host, to be quantised or offloaded."""

FRAME_RATES = ("frame_rate", "fps")
LAST = "last_image"
PICTURES = ("image", LAST)
CONTROL_PICTURE, CONTROL_SCALES = "control_image", ("controlnet_conditioning_scale", "conditioning_scale")
VAE = "vae"
TOKENIZERS = ("tokenizer", "tokenizer_2", "tokenizer_3")
SCALES = ("scale_factor_spatial", "scale_factor_temporal")
UNLIMITED = 10**6
"""Tokenizers without a limit state a number far above this."""

logger = logging.getLogger(__name__)


def inputs_of(request: MediaRequest, names: Collection[str], pictures: InputPictures = NO_PICTURES) -> dict[str, Any]:
    """Return the inputs among ``names`` that ``request`` sets; ``pictures`` are given to the encoder only."""
    video, control = pictures.video, pictures.control
    mask = None if pictures.mask is None else pictures.mask.image()
    inputs: dict[str, Any] = {
        "prompt": request.prompt,
        "height": request.height,
        "width": request.width,
        "max_area": request.width * request.height,
        "num_frames": request.num_frames,
        "num_inference_steps": request.num_inference_steps,
        "guidance_scale": request.guidance_scale,
        "strength": request.strength,
        "layers": request.num_layers or None,
        "sigmas": np.array(request.solver.sigmas) if request.solver.sigmas else None,  # some solvers compute with it
        "timesteps": list(request.solver.timesteps) or None,
        "generator": torch.Generator().manual_seed(request.seed),
        "output_type": "pt",
        "use_kv_cache": False,  # stand-ins for the transformer have none
        **dict.fromkeys(FRAME_RATES, request.fps),
        "video": None if video is None else video.frames(),
        CONTROL_PICTURE: None if control is None else control.cut_to(request.width, request.height).image(),
        **dict.fromkeys(CONTROL_SCALES, request.control_scale),
        "control_guidance_start": request.control_guidance_start,
        "control_guidance_end": request.control_guidance_end,
        **_picture_inputs([_image(picture, request) for picture in pictures.pictures], mask, names),
    }
    if request.true_cfg_scale > 1:
        inputs["negative_prompt"] = request.negative_prompt
    return {name: value for name, value in inputs.items() if name in names and value is not None}


def _image(picture: InputPicture, request: MediaRequest) -> Image:
    """Return the picture with opacity if it is split into layers: other auto-encoders have no such channel."""
    return picture.image() if request.num_layers else picture.on_white()


def _picture_inputs(images: list[Image], mask: Image | None, names: Collection[str]) -> Mapping[str, Any]:
    """Return several pictures as one list, or as a clip's first and last frame."""
    if not images:
        return {}
    if LAST in names and len(images) == 2:
        return {"image": images[0], LAST: images[1], "mask_image": mask}
    return {"image": images[0] if len(images) == 1 else images, "mask_image": mask}


class OpenedPipeline:
    """The blocks of the diffusers folder ``path``. Models are on ``device`` and compute in ``dtype``.

    Blocks run on the same device, or on the CPU if models are on "meta", which has no values. ``file`` replaces the
    weights of the one transformer. ValueError if diffusers has no blocks for the folder.
    """

    def __init__(self, path: Path, device: torch.device, dtype: torch.dtype, file: Path | None = None) -> None:
        self.path, self.models_device, self.dtype, self._file = path, device, dtype, file
        self.device = torch.device("cpu") if device.type == "meta" else device
        with timed("load: blocks"):
            self.pipeline = _set_device(open_modular(path), self.device, dtype)
        self.blocks: Any = self.pipeline.blocks
        self.sections = Sections.of(self.blocks)
        self._configs: dict[str, Any] = {}
        self._rank_parts: dict[str, Any] = {}
        self._outlines: dict[str, Any] = {}
        self.spec.patch_blocks(self.blocks)
        self.spec.extend_blocks(self.blocks, path)
        self.sections = Sections.of(self.blocks)

    @cached_property
    def inputs(self) -> Mapping[str, Any]:
        """The inputs of the whole pipeline, with diffusers' own defaults."""
        return {spec.name: spec for spec in self.blocks.inputs if spec.name is not None}

    def inputs_of(self, request: MediaRequest, pictures: InputPictures = NO_PICTURES) -> dict[str, Any]:
        """Return the inputs that ``request`` sets; ``pictures`` are given to the encoder only."""
        named, own = inputs_of(request, self.inputs, pictures), self.spec.pipeline_inputs(self.path, request)
        if placed := self.spec.place_pictures(self.path, request, pictures):
            return {**{name: value for name, value in named.items() if name not in PICTURES}, **own, **placed}
        return {**named, **own, **{name: named[name] for name in PICTURES if name in named}}

    def input_names(self, sections: Iterable[str]) -> frozenset[str]:
        """Return the values that the outermost blocks of these names read."""
        specs = (spec for name in sections for spec in self.blocks.sub_blocks[name].inputs)
        return frozenset(spec.name for spec in specs if spec.name is not None)

    def state(self, inputs: Mapping[str, Any]) -> PipelineState:
        """Return the pipeline's values before any block runs: ``inputs``, and diffusers' defaults for all others."""
        state = PipelineState()
        for name, spec in self.inputs.items():
            state.set(name, inputs.get(name, spec.default), spec.kwargs_type)
        return state

    @cached_property
    def transformers(self) -> tuple[str, ...]:
        """Names of the parts whose forwards the gang makes: denoisers of the loop that have weights."""
        return tuple(name for name in self._denoisers if name not in self.spec.unused_parts(self.path))

    @cached_property
    def control_part(self) -> str:
        """Name of the control network, which runs in the transformer's forward; empty if the folder has none."""
        name = self.spec.control_part
        return name if name in self.parts_of((self.sections.denoise,)) else ""

    @cached_property
    def spec(self) -> ModelSpec:
        return load_spec(self.part_class(self._denoisers[0]).__name__)

    @cached_property
    def _denoisers(self) -> tuple[str, ...]:
        parts = self.parts_of((self.sections.denoise,))
        return tuple(name for name in parts if {"transformer", "unet"} & set(name.split("_")))

    def max_tokens(self, limit: int) -> int:
        """Return ``limit``, or fewer if every tokenizer's limit is lower."""
        folders = (part_folder(self.path, name) for name in TOKENIZERS if part_class(self.path, name))
        configs = (folder / "tokenizer_config.json" for folder in folders)
        own = [json.loads(file.read_text()).get("model_max_length") for file in configs if file.is_file()]
        limited = [int(number) for number in own if number is not None and number < UNLIMITED]
        return min(limit, max(limited)) if limited else limit

    def part_class(self, name: str) -> Any:
        return self.pipeline.get_component_spec(name).type_hint

    def part_config(self, name: str) -> Any:
        """Return a model's configuration; missing keys have the class's defaults."""
        if name not in self._configs:
            self._configs[name] = self._read_part_config(name)
        return self._configs[name]

    def load(self, sections: Iterable[str], encoders_stay: WeightsOnHost | None = None) -> Any:
        """Return a pipeline for the blocks of ``sections``, with their models loaded and outlines of all others.

        Weights of text encoders whose names ``encoders_stay`` returns stay on the host.
        """
        wanted = self.loaded_parts(sections)

        def make(name: str) -> Any:
            stays = encoders_stay if name.startswith(ENCODERS) else None
            return self.load_part(name, stays) if name in wanted else self._outline(name)

        pipeline = self._with_parts(make)
        self.spec.complete_pipeline(pipeline)
        return pipeline

    @cached_property
    def outlined(self) -> Any:
        """A pipeline for the decoder, with ``_shared_outline`` of all parts, patched like a loaded one.

        It has no guardrail, which would be loaded.
        """
        pipeline = self._with_parts(self._shared_outline)
        if getattr(pipeline, "requires_safety_checker", False):
            pipeline.register_to_config(enable_safety_checker=False)
        self.spec.complete_pipeline(pipeline)
        return pipeline

    @cached_property
    def for_ranks(self) -> Any:
        """A pipeline for preparation and loop, with ``_shared_outline`` of all parts."""
        pipeline = self._with_parts(self._shared_outline)
        if self.control_part:
            getattr(pipeline, self.control_part).forward = _RecordedControl(self.spec)
        opened = proxy(self)  # in a cycle, all weights would wait for the garbage collector
        pipeline.rank_part = lambda name: opened.rank_part(name)
        return pipeline

    def rank_part(self, name: str) -> Any:
        """Return one of the spec's ``rank_parts``, loaded at the first call."""
        assert name in self.spec.rank_parts, name
        if name not in self._rank_parts:
            self._rank_parts[name] = self.load_part(name)
        return self._rank_parts[name]

    def load_part(self, name: str, stays: WeightsOnHost | None = None, axis: Axis = ALONE) -> Any:
        """Return the loaded part, a transformer with its control network as a submodule.

        Weights whose names ``stays`` returns of both stay on the host. The ranks of ``axis`` read files in diffusers'
        layout together: all make this call.
        """
        of_network = None if stays is None else partial(self._network_stays, name, stays)
        with timed(f"load: {name}"):
            part = self._load_part(name, stays, axis)
        return self._with_control(name, part, lambda network: self._load_part(network, of_network, axis))

    def _network_stays(self, name: str, stays: WeightsOnHost, network: nn.Module) -> frozenset[str]:
        """Return what ``stays`` returns of a control network in the transformer ``name``, by the network's names."""
        with init_empty_weights():
            whole = self._with_control(name, self._part_outline(name), lambda _: network)
        prefix = f"{self.control_part}."
        return frozenset(one.removeprefix(prefix) for one in stays(whole) if one.startswith(prefix))

    def _load_part(self, name: str, stays: WeightsOnHost | None = None, axis: Axis = ALONE) -> Any:
        spec = self.pipeline.get_component_spec(name)
        if not issubclass(spec.type_hint, nn.Module):
            return _load_small_part(spec)
        if self._file is not None and name in self.transformers:
            if len(self.transformers) > 1:
                raise ValueError(f"{self._file} is one transformer, and {self.path} has {', '.join(self.transformers)}")
            return self._load_file(name, self._file, stays)
        folder = part_folder(self.path, name)
        if self._file is not None and U_NET in self.transformers and has_part(self._file, name):
            part = load_part(spec.type_hint, name, self._file, folder, self._loading_device(stays), self.dtype_of(name))
            return self._moved(part.eval().requires_grad_(False), stays)
        if issubclass(spec.type_hint, ModelMixin) and (file := lone_file(folder)) is not None:
            return self._load_file(name, file, stays)
        if name in self.transformers and (quantiser := quantiser_of(folder)):
            needs_gpu = quantiser == "bitsandbytes"
            device = self.models_device if needs_gpu else self._loading_device(stays)
            return self._placed(load_folder(spec, folder, device, self.dtype), stays)
        is_of_ranks = name in (*self.transformers, self.control_part)
        is_fast = is_of_ranks and (self.models_device.type == "cuda" or axis.size > 1)
        is_read_here = issubclass(spec.type_hint, ModelMixin) and (is_fast or has_scales(folder))
        if is_read_here and (model := self._read_part(name, folder, stays, axis)) is not None:
            return model
        if stays and (quantiser := quantiser_of(folder)):
            raise ValueError(
                f"the layers of {folder}, quantised by {quantiser}, cannot be in host memory: remove "
                "text_encoder.offloads_layers"
            )
        model = load_folder(spec, folder, self._loading_device(stays), self.dtype_of(name)).eval().requires_grad_(False)
        return self._moved(model, stays) if stays else model

    def _read_part(self, name: str, folder: Path, stays: WeightsOnHost | None, axis: Axis = ALONE) -> Any:
        """Return the model as diffusers loads it, but faster; None for files that only diffusers can read."""
        with init_empty_weights():
            model = self._part_outline(name)
        try:
            fill(model, files_of(folder), self.models_device, stays(model) if stays else (), axis)
        except ValueError as error:
            if has_scales(folder):
                raise ValueError(f"{folder} cannot be read: {error}") from error
            logger.info("diffusers reads the weights in %s: tensors do not match the class: %s", folder, error)
            return None
        check_finite(model, lambda weight: file_of(folder, weight))
        return model

    def _load_file(self, name: str, file: Path, stays: WeightsOnHost | None) -> Any:
        folder = part_folder(self.path, name)
        if name in self.transformers:
            auto_encoder = self.part_class(VAE) if part_class(self.path, VAE) else None
            check_base(name, file, self.path, auto_encoder, reads_parts=name == U_NET and file == self._file)
        model = load_single_file(self.part_class(name), file, folder, self._loading_device(stays), self.dtype_of(name))
        if name in self.transformers:
            return self._placed(model, stays)
        model = cast_like_diffusers(model, self.dtype_of(name))
        return self._moved(model.eval().requires_grad_(False), stays)

    def _loading_device(self, stays: WeightsOnHost | None) -> torch.device:
        return torch.device("cpu") if stays else self.models_device

    def _placed(self, model: Any, stays: WeightsOnHost | None) -> Any:
        """Return ``model`` in the dtypes of a loaded one, on the device with all weights but those that stay."""
        return self._moved(self.as_loaded(model), stays)

    def _moved(self, model: Any, stays: WeightsOnHost | None) -> Any:
        """Return ``model`` on the device, with all weights but those that stay."""
        on_host = stays(model) if stays else ()
        move_from_host((each for own, each in model.named_parameters() if own not in on_host), self.models_device)
        move_buffers(model, self.models_device)
        return model

    def outline(self, name: str) -> Any:
        """Return the model from its configuration, without weight values, in the dtypes of a loaded one.

        A transformer has its control network. Under fake tensors, or ``init_empty_weights``, it takes no memory.
        """
        return self._with_control(name, self._part_outline(name), self._part_outline)

    def _with_control(self, name: str, model: Any, make: Callable[[str], Any]) -> Any:
        """Return ``model``; if it is a transformer, with the control network of the folder that ``make`` returns."""
        if self.control_part and name in self.transformers:
            model.add_module(self.control_part, make(self.control_part))
        return model

    def _part_outline(self, name: str) -> Any:
        with no_init_weights():  # else torch works out random values, even on "meta"
            model = self.part_class(name).from_config(dict(read_config(self.path, name)))
        return self.as_loaded(model)

    def dtype_of(self, name: str) -> torch.dtype:
        """Return the dtype of a loaded part's weights, but for those that its class keeps in float32."""
        return torch.float32 if name in self.spec.float32_parts else self.dtype

    def as_loaded(self, model: Any) -> Any:
        """Cast ``model`` to the dtypes of a folder's model: parts that its class keeps in float32 are not cast."""
        wide = set(model._keep_in_fp32_modules or ())
        for key, parameter in model.named_parameters():
            parameter.data = parameter.data.to(torch.float32 if wide & set(key.split(".")) else self.dtype)
        return model.eval().requires_grad_(False)

    def _read_part_config(self, name: str) -> Any:
        spec = self.pipeline.get_component_spec(name)
        config = read_config(self.path, name)
        parameters = inspect.signature(spec.type_hint.__init__).parameters.values()
        defaults = {one.name: one.default for one in parameters if one.default is not one.empty}
        settings = {key: value for key, value in read_index(self.path).items() if not isinstance(value, list | dict)}
        control = {CONTROL: read_config(self.path, self.control_part)} if self.control_part else {}
        return FrozenDict(defaults | dict(config) | control | {"pipeline": settings})

    def parts_of(self, sections: Iterable[str]) -> tuple[str, ...]:
        """Return the names of the parts in the folder that these blocks may use."""
        specs = (spec for name in sections for spec in self.blocks.sub_blocks[name].expected_components)
        names = dict.fromkeys(spec.name for spec in specs)
        return tuple(name for name in names if self._is_in_folder(name))

    def loaded_parts(self, sections: Iterable[str]) -> tuple[str, ...]:
        """Return the parts that encoder or decoder loads for these blocks.

        Transformers and control networks are the gang's: blocks outside the loop read their configuration or
        positions only.
        """
        others = (*self._denoisers, self.control_part, *self.spec.unused_parts(self.path))
        return tuple(name for name in self.parts_of(sections) if name not in others)

    def _is_in_folder(self, name: str) -> bool:
        spec = self.pipeline.get_component_spec(name)
        is_named = spec.default_creation_method == "from_pretrained" and spec.pretrained_model_name_or_path is not None
        return is_named and isinstance(spec.type_hint, type)

    def _with_parts(self, make: Any) -> Any:
        pipeline = copy.copy(self.pipeline)
        for name in self.parts_of(self.blocks.sub_blocks):
            setattr(pipeline, name, None if name in self.spec.unused_parts(self.path) else make(name))
        return pipeline

    def _outline(self, name: str) -> Any:
        """Return the attributes of a part that another process runs: a model's configuration and structure.

        Small parts of diffusers (schedulers) are loaded; for transformers' models and tokenizers, return None.
        """
        part = self.part_class(name)
        if issubclass(part, ModelMixin):
            with init_empty_weights():
                return self._part_outline(name)
        return self.load_part(name) if part.__module__.startswith("diffusers.") else None

    def _shared_outline(self, name: str) -> Any:
        """Return a transformer's stand-in or another part's outline, made once for ``outlined`` and ``for_ranks``."""
        if name not in self._outlines:
            self._outlines[name] = self._stand_in(name) if name in self.transformers else self._outline(name)
        return self._outlines[name]

    def _stand_in(self, name: str) -> RecordingTransformer:
        outline = self._outline(name) if self.spec.block_modules else None
        parts = {part: getattr(outline, part) for part in self.spec.block_modules}
        config, blank = self.part_config(name), self.spec.blank_prediction
        return RecordingTransformer(name, self.part_class(name), config, self.models_device, self.dtype, blank, parts)


@dataclass(frozen=True, slots=True)
class _RecordedControl:
    """Takes the calls of a control network, which the transformer's forward makes; see ``control_residuals``."""

    spec: ModelSpec

    def __call__(self, *_args: Any, return_dict: bool = True, **call: Any) -> Any:
        return self.spec.control_residuals(call)


def modules_of(pipeline: Any) -> tuple[nn.Module, ...]:
    """Return the models of ``pipeline`` that have weights; outlines are on "meta"."""
    modules = (one for one in vars(pipeline).values() if isinstance(one, nn.Module))
    return tuple(one for one in modules if not any(weight.is_meta for weight in one.parameters()))


def _load_small_part(spec: Any) -> Any:
    """Load a small part. ValueError if torchvision is missing, which transformers' errors do not mention."""
    try:
        return spec.load()
    except (AttributeError, ImportError) as error:
        if find_spec("torchvision") is not None:
            raise
        raise ValueError(f"the {spec.name} of this model needs torchvision: install it beside torch") from error


def _set_device(pipeline: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """Set the device and dtype of ``pipeline`` for any parts: diffusers uses those of its first model."""
    own = {
        **{name: property(lambda _: device) for name in ("device", "_execution_device")},
        "dtype": property(lambda _: dtype),
        **{f"vae_{name}": _vae_property(name) for name in SCALES if hasattr(type(pipeline), f"vae_{name}")},
    }
    pipeline.__class__ = type(type(pipeline).__name__, (type(pipeline),), own)
    return pipeline


def _vae_property(name: str) -> property:
    """Return a property for the auto-encoder's configured scale; pipelines guess it from the number of stages."""

    def scale(pipeline: Any) -> Any:
        value = getattr(getattr(pipeline, VAE, None), "config", {}).get(name)
        return value or getattr(super(type(pipeline), pipeline), f"vae_{name}")

    return property(scale)
