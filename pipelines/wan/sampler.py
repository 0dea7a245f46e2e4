"""Wan's solver: flow matching with the solver that the directory names, UniPC (arXiv:2302.04867) or Euler."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from engines.core.model import Branch
from pipelines.directory import read_config, read_index
from pipelines.guidance import guided
from pipelines.request import MediaRequest
from pipelines.solver import Scheduler, clean_estimate, load_scheduler, solve_step, timesteps_on
from pipelines.wan.geometry import Geometry, read_geometry
from pipelines.wan.latents import draw_noise
from pipelines.wan.text import WanConditioning

HIGH_NOISE, LOW_NOISE = "transformer", "transformer_2"


@dataclass(frozen=True, kw_only=True, slots=True)
class WanState:
    """A job after ``step`` steps. ``prompts_BTC`` on the device; ``velocity_BCFHW`` is the newest guided prediction."""

    request: MediaRequest
    prompts_BTC: tuple[Tensor, ...]
    scheduler: Scheduler
    step: int
    timesteps_S: Tensor
    latents_BCFHW: Tensor
    velocity_BCFHW: Tensor | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class WanSampler:
    """Implements ``engines.core.sampler.Sampler``. Latents are float32; ``dtype`` is what the transformer gets.

    ``boundary_ratio``: timesteps below this share of the training range go to the second transformer (Wan 2.2).
    ``expand_timesteps``: the transformer takes one timestep a token (Wan 2.2 TI2V).
    """

    scheduler: Scheduler
    num_channels: int
    geometry: Geometry
    boundary_ratio: float | None
    expand_timesteps: bool
    device: torch.device
    dtype: torch.dtype

    def begin(self, request: MediaRequest, conditioning: WanConditioning) -> WanState:
        noise_BCFHW = draw_noise(request.seed, self.num_channels, self.geometry.latent_size(request))
        scheduler = set_schedule(self.scheduler, request.num_inference_steps)
        return WanState(
            request=request,
            prompts_BTC=self._prompts(request, conditioning),
            scheduler=scheduler,
            step=0,
            timesteps_S=timesteps_on(scheduler, self.device),
            latents_BCFHW=noise_BCFHW.to(self.device),
        )

    def num_steps(self, state: WanState) -> int:
        return len(state.timesteps_S)

    def branches(self, state: WanState) -> tuple[Branch, ...]:
        shared = {"hidden_states": state.latents_BCFHW.to(self.dtype), "timestep": self._timestep(state)}
        module = self._module(state)
        return tuple(
            Branch(inputs={**shared, "encoder_hidden_states": prompt_BTC}, module=module)
            for prompt_BTC in state.prompts_BTC
        )

    def advance(self, state: WanState, predictions: tuple[Tensor, ...]) -> WanState:
        velocity = guided(predictions, state.request.true_cfg_scale)
        scheduler, latents = solve_step(state.scheduler, state.step, velocity, state.latents_BCFHW)
        return replace(state, scheduler=scheduler, step=state.step + 1, latents_BCFHW=latents, velocity_BCFHW=velocity)

    def latents(self, state: WanState) -> Tensor:
        """``latents_BCFHW`` on the CPU."""
        return state.latents_BCFHW.cpu()

    def preview(self, state: WanState) -> Tensor:
        """``latents_BCFHW`` on the CPU: the estimate of the finished ones."""
        return clean_estimate(state.scheduler, state.step, state.velocity_BCFHW, state.latents_BCFHW).cpu()

    def _module(self, state: WanState) -> str:
        """Read off the scheduler's own timesteps, which lie on the CPU: no device sync."""
        if self.boundary_ratio is None:
            return HIGH_NOISE
        boundary = self.boundary_ratio * state.scheduler.config.num_train_timesteps
        return HIGH_NOISE if state.scheduler.timesteps[state.step] >= boundary else LOW_NOISE

    def _timestep(self, state: WanState) -> Tensor:
        timestep_B = state.timesteps_S[state.step : state.step + 1]
        if not self.expand_timesteps:
            return timestep_B
        frames, height, width = state.latents_BCFHW.shape[2:]
        grid = self.geometry.token_grid((frames, height, width))
        return timestep_B.expand(1, grid[0] * grid[1] * grid[2])

    def _prompts(self, request: MediaRequest, conditioning: WanConditioning) -> tuple[Tensor, ...]:
        assert (conditioning.negative_BTC is not None) == (request.true_cfg_scale > 1), "another request's conditioning"
        prompts = (conditioning.prompt_BTC, conditioning.negative_BTC)
        return tuple(prompt_BTC.to(self.device, self.dtype) for prompt_BTC in prompts if prompt_BTC is not None)


def set_schedule(scheduler: Scheduler, num_steps: int) -> Scheduler:
    """A scheduler of its own for one job."""
    own = type(scheduler).from_config(scheduler.config)
    own.set_timesteps(num_steps)
    own.set_begin_index(0)
    return own


def load_sampler(path: Path, device: torch.device, dtype: torch.dtype) -> WanSampler:
    index = read_index(path)
    return WanSampler(
        scheduler=check_flow(
            path, load_scheduler(path, ("UniPCMultistepScheduler", "FlowMatchEulerDiscreteScheduler"))
        ),
        num_channels=read_config(path, HIGH_NOISE)["in_channels"],
        geometry=read_geometry(path),
        boundary_ratio=index.get("boundary_ratio"),
        expand_timesteps=index.get("expand_timesteps", False),
        device=device,
        dtype=dtype,
    )


def check_flow(path: Path, scheduler: Scheduler) -> Scheduler:
    """``scheduler`` if it solves flows: previews, and the model itself, speak of velocities."""
    prediction_type = scheduler.config.get("prediction_type", "flow_prediction")
    if prediction_type != "flow_prediction":
        raise ValueError(f"{path / 'scheduler'} has prediction_type {prediction_type!r}; Wan needs 'flow_prediction'")
    return scheduler
