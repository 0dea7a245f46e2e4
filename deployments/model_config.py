"""Configuration of one served model. Unknown keys are errors."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Literal, Self, cast

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, PositiveFloat, model_validator

from deployments.requests.enhancer_config import PromptEnhancerConfig
from deployments.requests.fields import Quality
from deployments.stages.stage_config import DataType, DecoderConfig, DenoiserConfig, EncoderConfig
from engines.core.spec import Attention
from pipelines.loading import ModelSource
from pipelines.lora.source import LoraLimits, LoraSource, check_sources
from pipelines.recipes import Recipe, check_recipe_name

if TYPE_CHECKING:
    from pipelines.models.spec import ModelSpec


def _model_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        allowed = "letters, digits, points, dashes and underscores, the first a letter or a digit"
        raise ValueError(f"{name!r} is no name for a model: it must be made of {allowed}")
    return name


def _recipes(section: object) -> object:
    recipes = section.items() if isinstance(section, Mapping) else ()
    for name, recipe in recipes:
        if isinstance(recipe, Mapping) and (given := [key for key in WEIGHT_KEYS if key in recipe]):
            raise ValueError(
                f"the recipe {name} has {given[0]}, and requests share one copy of the weights: serve a second model "
                f"of the same path with denoiser.{given[0]}, under a name of its own, and leave it out here"
            )
    return section


WEIGHT_KEYS = ("precision", "quantization")
"""Keys of weights, which no request changes."""
SECTION = ConfigDict(extra="forbid", frozen=True)
"""Settings of the classes of sections."""
ModelName = Annotated[str, AfterValidator(_model_name)]


class ModelConfig(BaseModel):
    """One served model."""

    model_config = SECTION

    name: ModelName
    """Name in requests and metrics."""
    path: str = ""
    """A shipped checkpoint's name, a diffusers directory, a hub id, or a transformer as one file."""
    base: str = ""
    """All other parts of a model with a transformer file, as a directory, name or hub id."""
    controlnet: str = ""
    """A control network that is not in the model's directory, as a directory or hub id."""
    upsampler: str = ""
    """A latent upsampler that is not in the model's directory, as a directory or hub id."""
    workflow: str = ""
    """A use of the model that needs another of its transformers (MiniMax-H3: ref2va)."""
    aliases: tuple[ModelName, ...] = ()
    """Further names in requests, for clients with a fixed one ("gpt-image-1")."""
    dtype: DataType = "auto"
    """Dtype of weights and activations; "auto": bfloat16 on GPUs, float32 on CPUs."""
    loras: tuple[LoraSource, ...] = ()
    """Adapters: merged without a name, else for the requests that name them."""
    runtime_loras: LoraLimits | None = None
    """Limits of adapters that clients add at run time; None: they may add none."""
    prompt_enhancer: PromptEnhancerConfig | None = None
    """Rewrites prompts; None: that of ``api``, if there is one."""
    recipes: Annotated[dict[str, Recipe], BeforeValidator(_recipes)] = {}
    """Defaults of requests that name one, by its name: those that ship with the family, or of one's own."""
    qualities: dict[Quality, str] = {}
    """Recipe that a request's ``quality`` stands for; the others change the number of steps alone."""
    memory_gib: PositiveFloat | None = None
    """Memory of each GPU: what does not fit is made to, by the cheapest savings; None: nothing is changed."""
    allow_quantization: bool = False
    """Savings of ``memory_gib`` may quantise the transformer, if no lossless ones suffice."""
    share: str = ""
    """Name of a group of models whose gangs are on the same GPUs. The gangs that fit are awake; the others sleep in
    host memory. Empty: GPUs of its own."""
    stages: Literal["apart", "together"] = "apart"
    """Text encoder and decoder as two deployments, or one with the section ``text_encoder``."""
    text_encoder: EncoderConfig = EncoderConfig()
    """Deployment of the text encoder."""
    denoiser: DenoiserConfig = DenoiserConfig()
    """Deployment of the gangs."""
    decoder: DecoderConfig = DecoderConfig()
    """Deployment of the decoder."""

    @model_validator(mode="after")
    def _check_engine(self) -> Self:
        for name in self.recipes:
            check_recipe_name(name)
        check_sources(self.adapters)
        _ = self.source
        names = [one.name for one in self.adapters]
        self.denoiser.check_engine(
            self.dtype,
            merges="" in names,
            switches=any(names) or self.runtime_loras is not None,
            attentions=self.attentions,
        )
        return self

    @model_validator(mode="after")
    def _check_memory(self) -> Self:
        if self.allow_quantization and self.memory_gib is None:
            raise ValueError("allow_quantization has no effect without memory_gib: give it as well, or leave it out")
        if self.memory_gib is None:
            return self
        if self.share:
            raise ValueError(
                f"memory_gib is for a model with GPUs of its own, and share is {self.share}: limit the group by "
                f"shares.{self.share}.memory_gib"
            )
        if self.denoiser.engine != "torch":
            raise ValueError(
                f"memory_gib needs engine: torch, and engine is {self.denoiser.engine}: remove one of them"
            )
        return self

    @model_validator(mode="after")
    def _check_turns(self) -> Self:
        if not self.text_encoder.takes_turns:
            return self
        if self.share:
            raise ValueError(f"text_encoder.takes_turns has no effect beside share: {self.share}: remove one of them")
        if self.stages == "together":
            raise ValueError("text_encoder.takes_turns needs stages: apart, as it sleeps without the decoder")
        check_sleeping(self)
        return self

    @model_validator(mode="after")
    def _check_decoder(self) -> Self:
        if self.stages == "together" and self.decoder != DecoderConfig():
            raise ValueError(
                "the section decoder has no effect with stages: together, where text_encoder is for both: leave one of "
                "them out"
            )
        return self

    def path_problems(self, spec: ModelSpec) -> Iterator[str]:
        """Yield the settings that a model does not support as it is run: by its blocks, or as a whole pipeline."""
        if spec.is_whole:
            yield from self._whole_problems(spec.family)
        elif self.denoiser.compile:
            yield (
                f"denoiser.compile is for whole pipelines, and {spec.family} runs by its blocks, which are compiled "
                "on GPUs: remove it"
            )

    def _whole_problems(self, family: str) -> Iterator[str]:
        """Yield the settings that a pipeline does not support that runs as a whole, on one rank a gang."""
        denoiser, decoder = self.denoiser, self.decoder
        sizes = denoiser.warm_sizes if denoiser.compile else ()
        settings = (
            ("engine", denoiser.engine, ("torch",)),
            ("num_ranks", denoiser.num_ranks, (1,)),
            ("strategy", denoiser.strategy, ("auto",)),
            ("precision", denoiser.precision, ("auto", "native")),
            ("attention", denoiser.attention, ("auto",)),
            *(("attention of a recipe", one, ("auto",)) for one in self.attentions[1:]),
            ("load", denoiser.load, ("auto", "whole")),
            ("warm_sizes", denoiser.warm_sizes, (sizes,)),
            ("torch", denoiser.torch, (None,)),
            ("loras", self.adapters, ((),)),
            ("runtime_loras", self.runtime_loras, (None,)),
            ("base", self.base, ("",)),
            ("memory_gib", self.memory_gib, (None,)),
            ("controlnet", self.controlnet, ("",)),
            ("upsampler", self.upsampler, ("",)),
            ("workflow", self.workflow, ("",)),
            ("text_encoder.compile", self.text_encoder.compile, (False,)),
            ("text_encoder.offloads_layers", self.text_encoder.offloads_layers, (False,)),
            ("decoder.compile", decoder.compile, (False,)),
            ("decoder.memory_gib", decoder.memory_gib, (None,)),
            ("decoder.num_devices", decoder.num_devices, (1,)),
        )
        for key, given, allowed in settings:
            if given not in allowed:
                needed = " or ".join(repr(one) for one in allowed)
                yield f"{key} is {given!r}; {family} runs as a whole pipeline on one rank: it must be {needed}"

    @property
    def sleeps(self) -> bool:
        """True if its weights sleep at times: those of a share group, or of an encoder that takes turns."""
        return bool(self.share) or self.text_encoder.takes_turns

    @property
    def attentions(self) -> tuple[Attention, ...]:
        """Precisions of attention that requests may name: the gang's own, then those of recipes."""
        own = cast("Attention", self.denoiser.attention)
        return tuple(dict.fromkeys((own, *(one.attention for one in self.recipes.values() if one.attention))))

    @property
    def adapters(self) -> tuple[LoraSource, ...]:
        """The adapters of the model and those of its recipes."""
        return (*self.loras, *(source for name, recipe in self.recipes.items() for source in recipe.sources(name)))

    @property
    def max_jobs(self) -> int:
        """Number of jobs that the gangs admit, running ones included."""
        return self.denoiser.max_num_replicas * (self.denoiser.max_running_jobs + self.denoiser.max_waiting_jobs)

    @property
    def max_open_pictures(self) -> int:
        """Number of pictures that the gangs admit, and a quarter more for encoding and decoding."""
        return self.max_jobs + max(4, self.max_jobs // 4)

    @property
    def source(self) -> str:
        path = self.path or self.name
        file, base = (path, self.base) if self.base else ("", path)
        if self.controlnet and self.upsampler:
            raise ValueError("controlnet and upsampler are for different models: leave one of them out")
        parts = {"network": self.controlnet, "upsampler": self.upsampler}
        return str(ModelSource(base=base, file=file, workflow=self.workflow, **parts))


def check_sleeping(model: ModelConfig) -> None:
    """Raise ValueError if the weights of ``model`` cannot sleep."""
    stages = {"denoiser": model.denoiser, "text_encoder": model.text_encoder, "decoder": model.decoder}
    for stage, config in stages.items():
        if config.autoscaling is not None or config.num_replicas != 1:
            raise ValueError(f"{model.name}: {stage} has one replica without autoscaling where models share GPUs")
    if model.denoiser.engine != "torch":
        raise ValueError(f"{model.name}: models that share GPUs need engine: torch, whose weights can sleep")
    if model.denoiser.num_nodes != 1:
        raise ValueError(f"{model.name}: models that share GPUs are on one node: remove num_nodes")
