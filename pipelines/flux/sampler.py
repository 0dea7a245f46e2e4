"""FLUX's solver: flow matching (Esser et al. 2024, arXiv:2403.03206), sigmas shifted with the number of tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from engines.core.model import Branch, Schedule
from pipelines.defaults import check_sides
from pipelines.directory import read_config
from pipelines.flux import geometry
from pipelines.flux import latents as shapes
from pipelines.flux.text import FluxConditioning, FluxPrompt
from pipelines.guidance import guided
from pipelines.request import MediaRequest
from pipelines.solver import Scheduler, clean_estimate, load_scheduler, solve_step, timesteps_on


@dataclass(frozen=True, kw_only=True, slots=True)
class FluxState:
    """A job after ``step`` steps. ``prompts`` on the device; ``velocity_BSD`` is the newest guided prediction."""

    request: MediaRequest
    prompts: tuple[FluxPrompt, ...]
    scheduler: Scheduler
    step: int
    height: int
    width: int
    timesteps_S: Tensor
    image_ids_S3: Tensor
    text_ids_T3: Tensor
    guidance_B: Tensor | None
    latents_BSD: Tensor
    velocity_BSD: Tensor | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class FluxSampler:
    """Implements ``core.sampler.Sampler``. ``num_channels`` are the latent's (a token has four times as many)."""

    scheduler: Scheduler
    num_channels: int
    guidance_embeds: bool
    scale_factor: int
    device: torch.device
    dtype: torch.dtype

    def begin(self, request: MediaRequest, conditioning: FluxConditioning) -> FluxState:
        height, width = self._latent_size(request)
        noise_BCHW = shapes.draw_noise(request.seed, self.num_channels, height, width, self.dtype)
        latents_BSD = shapes.pack(noise_BCHW).to(self.device)
        scheduler = set_schedule(self.scheduler, request.num_inference_steps, latents_BSD.shape[1])
        return FluxState(
            request=request,
            prompts=self._prompts(request, conditioning),
            scheduler=scheduler,
            step=0,
            height=height,
            width=width,
            timesteps_S=timesteps_on(scheduler, self.device).to(self.dtype) / 1000,
            image_ids_S3=shapes.image_ids(height, width).to(self.device),
            text_ids_T3=shapes.text_ids(conditioning.prompt.tokens_BTC.shape[1]).to(self.device),
            guidance_B=self._guidance(request),
            latents_BSD=latents_BSD,
        )

    def num_steps(self, state: FluxState) -> int:
        return len(state.timesteps_S)

    def branches(self, state: FluxState) -> tuple[Branch, ...]:
        schedule = Schedule(timesteps_S=state.timesteps_S, step=state.step)
        return tuple(Branch(inputs=inputs_of(state, prompt), schedule=schedule) for prompt in state.prompts)

    def advance(self, state: FluxState, predictions: tuple[Tensor, ...]) -> FluxState:
        velocity_BSD = guided(predictions, state.request.true_cfg_scale)
        scheduler, latents_BSD = solve_step(state.scheduler, state.step, velocity_BSD, state.latents_BSD)
        return replace(
            state, scheduler=scheduler, step=state.step + 1, latents_BSD=latents_BSD, velocity_BSD=velocity_BSD
        )

    def latents(self, state: FluxState) -> Tensor:
        """``latents_BCHW`` on the CPU."""
        return shapes.unpack(state.latents_BSD, state.height, state.width).cpu()

    def preview(self, state: FluxState) -> Tensor:
        """``latents_BCHW`` on the CPU: the estimate of the finished ones."""
        estimate_BSD = clean_estimate(state.scheduler, state.step, state.velocity_BSD, state.latents_BSD)
        return shapes.unpack(estimate_BSD, state.height, state.width).cpu()

    def _latent_size(self, request: MediaRequest) -> tuple[int, int]:
        check_sides(request.width, request.height, self.scale_factor * geometry.PATCH)
        return request.height // self.scale_factor, request.width // self.scale_factor

    def _prompts(self, request: MediaRequest, conditioning: FluxConditioning) -> tuple[FluxPrompt, ...]:
        assert (conditioning.negative is not None) == (request.true_cfg_scale > 1), "conditioning of another request"
        prompts = (conditioning.prompt, conditioning.negative)
        return tuple(self._on_device(prompt) for prompt in prompts if prompt is not None)

    def _on_device(self, prompt: FluxPrompt) -> FluxPrompt:
        return FluxPrompt(
            tokens_BTC=prompt.tokens_BTC.to(self.device, self.dtype),
            pooled_BC=prompt.pooled_BC.to(self.device, self.dtype),
        )

    def _guidance(self, request: MediaRequest) -> Tensor | None:
        if not self.guidance_embeds:
            return None
        return torch.full((1,), request.guidance_scale, device=self.device, dtype=torch.float32)


def inputs_of(state: FluxState, prompt: FluxPrompt) -> dict[str, Tensor]:
    """Keyword arguments of ``FluxTransformer2DModel.forward`` for the next step of one branch."""
    inputs = {
        "hidden_states": state.latents_BSD,
        "encoder_hidden_states": prompt.tokens_BTC,
        "pooled_projections": prompt.pooled_BC,
        "timestep": state.timesteps_S[state.step : state.step + 1],
        "img_ids": state.image_ids_S3,
        "txt_ids": state.text_ids_T3,
    }
    return inputs if state.guidance_B is None else {**inputs, "guidance": state.guidance_B}


def set_schedule(scheduler: Scheduler, num_steps: int, num_tokens: int) -> Scheduler:
    """A scheduler of its own for one job: even sigmas, moved towards noise the more tokens there are (``mu``)."""
    own = type(scheduler).from_config(scheduler.config)
    own.set_timesteps(sigmas=np.linspace(1.0, 1 / num_steps, num_steps), mu=time_shift(own.config, num_tokens))
    own.set_begin_index(0)
    return own


def time_shift(config: dict[str, float], num_tokens: int) -> float:
    """``mu``: linear in the number of image tokens, through the two points that the scheduler's config gives."""
    slope = (config["max_shift"] - config["base_shift"]) / (config["max_image_seq_len"] - config["base_image_seq_len"])
    offset = config["base_shift"] - slope * config["base_image_seq_len"]
    return num_tokens * slope + offset


def load_sampler(path: Path, device: torch.device, dtype: torch.dtype) -> FluxSampler:
    transformer = read_config(path, "transformer")
    return FluxSampler(
        scheduler=load_scheduler(path, ("FlowMatchEulerDiscreteScheduler",)),
        num_channels=transformer["in_channels"] // geometry.PATCH**2,
        guidance_embeds=transformer["guidance_embeds"],
        scale_factor=geometry.scale_factor(path),
        device=device,
        dtype=dtype,
    )
