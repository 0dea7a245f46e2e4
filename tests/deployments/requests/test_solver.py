"""Solver settings of a body are checked against the model, with the wrong field, and stored in a clip's record."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from deployments.clips.database import request_from_json, to_json
from deployments.requests.bodies import ImageBody, VideoBody
from deployments.requests.request_errors import RequestError
from deployments.requests.rules import Requester, RequestRules
from deployments.requests.validation import validated, validated_form
from deployments.service.interface import ModelCard
from pipelines.models.registry import load_spec
from pipelines.request import NO_PICTURES, MediaRequest
from pipelines.solver import FLOW, NOISE, Solver, SolverLimits, own_name
from tests.deployments.support.fake_service import CLIPS, PICTURES

FLUX = SolverLimits(scheduler="euler", schedulers=("euler", "unipc"), is_flow=True, inputs=("sigmas",))
WAN = SolverLimits(
    scheduler="unipc", schedulers=tuple(FLOW), is_flow=True, inputs=("sigmas", "timesteps"), boundary_ratio=0.875
)
SDXL = SolverLimits(scheduler="euler", schedulers=tuple(NOISE), inputs=("sigmas", "timesteps"))


def checked(limits: SolverLimits, **fields: Any) -> MediaRequest:
    is_clip = limits.boundary_ratio is not None
    card = ModelCard(name="m", family="f", created=0, defaults=replace(CLIPS if is_clip else PICTURES, solver=limits))
    body = validated(VideoBody if is_clip else ImageBody, {"prompt": "a", **fields})
    return RequestRules(card).check(body, NO_PICTURES, Requester(request_id="id"))


TAKEN: list[tuple[SolverLimits, dict[str, Any], Solver, int | None]] = [
    (FLUX, {}, Solver(), None),
    (FLUX, {"flow_shift": 3, "scheduler": "unipc"}, Solver(flow_shift=3.0, scheduler="unipc"), None),
    (FLUX, {"sigmas": [1, 0.5]}, Solver(sigmas=(1.0, 0.5)), 2),
    (FLUX, {"sigmas": [1, 0.5], "num_inference_steps": 2, "quality": "low"}, Solver(sigmas=(1.0, 0.5)), 2),
    (WAN, {"guidance_scale_2": 3, "boundary_ratio": 0.9}, Solver(guidance_scale_2=3.0, boundary_ratio=0.9), None),
    (WAN, {"scheduler": "euler", "timesteps": [900, 30]}, Solver(scheduler="euler", timesteps=(900.0, 30.0)), 2),
    (WAN, {"guidance_scale_2": 1, "true_cfg_scale": 1}, Solver(guidance_scale_2=1.0), None),
    (SDXL, {"scheduler": "lcm", "timesteps": [999, 1]}, Solver(scheduler="lcm", timesteps=(999.0, 1.0)), 2),
]


@pytest.mark.parametrize(("limits", "fields", "solver", "num_steps"), TAKEN, ids=str)
def test_settings_reach_the_request(
    limits: SolverLimits, fields: dict[str, Any], solver: Solver, num_steps: int | None
) -> None:
    request = checked(limits, **fields)
    assert request.solver == solver
    if num_steps is not None:
        assert request.num_inference_steps == num_steps
    assert request_from_json(to_json(request)) == request


REFUSED: list[tuple[SolverLimits, dict[str, Any], str, str]] = [
    (FLUX, {"scheduler": "ddim"}, "scheduler", "scheduler is 'ddim'; it must be one of euler, unipc"),
    (SolverLimits(), {"scheduler": "euler"}, "scheduler", "this model's is fixed"),
    (SolverLimits(), {"flow_shift": 2}, "flow_shift", "this model's schedule has none"),
    (SDXL, {"flow_shift": 2}, "flow_shift", "this model's schedule has none"),
    (FLUX, {"flow_shift": 0}, "flow_shift", "it must be above 0 and at most 1000"),
    (FLUX, {"sigmas": [0.5, 1.0]}, "sigmas", r"sigmas is \[0.5, 1\]: it must fall from at most 1 to a last"),
    (FLUX, {"sigmas": [0.5, 0.5]}, "sigmas", "must fall"),
    (FLUX, {"sigmas": [1.0, 0.0]}, "sigmas", "a last value above 0"),
    (FLUX, {"sigmas": [14.6, 1.0]}, "sigmas", "at most 1 "),
    (FLUX, {"sigmas": []}, "sigmas", "it must be a list of 1 to 1000 numbers"),
    (FLUX, {"sigmas": [True]}, "sigmas", "it must be a list of 1 to 1000 numbers"),
    (FLUX, {"sigmas": 0.5}, "sigmas", "it must be a list of 1 to 1000 numbers"),
    (FLUX, {"sigmas": [1, 0.5], "num_inference_steps": 4}, "num_inference_steps", "is 4, and sigmas has 2"),
    (FLUX, {"sigmas": [1 - i / 200 for i in range(101)]}, "num_inference_steps", "from 1 to 100"),
    (FLUX, {"timesteps": [900, 30]}, "timesteps", "this model takes no timesteps"),
    (WAN, {"timesteps": [900, 30]}, "timesteps", "scheduler unipc takes no timesteps; those that do: euler"),
    (WAN, {"sigmas": [1, 0.5], "timesteps": [900, 30]}, "sigmas", "give one of them"),
    (FLUX, {"guidance_scale_2": 3}, "guidance_scale_2", "this model has one transformer"),
    (FLUX, {"boundary_ratio": 0.5}, "boundary_ratio", "this model has one transformer"),
    (WAN, {"guidance_scale_2": 3, "true_cfg_scale": 1}, "guidance_scale_2", "guidance is off"),
    (WAN, {"boundary_ratio": 1.5}, "boundary_ratio", "it must be from 0 to 1"),
]


@pytest.mark.parametrize(("limits", "fields", "param", "told"), REFUSED, ids=str)
def test_what_does_not_suit_is_refused(limits: SolverLimits, fields: dict[str, Any], param: str, told: str) -> None:
    with pytest.raises(RequestError, match=told) as caught:
        checked(limits, **fields)
    assert caught.value.param == param


def test_a_form_has_lists_as_text() -> None:
    assert validated_form(ImageBody, {"prompt": "a", "sigmas": "[1, 0.5]"}).sigmas == (1.0, 0.5)
    with pytest.raises(RequestError, match="a list of 1 to 1000 numbers"):
        validated_form(ImageBody, {"prompt": "a", "sigmas": "1, 0.5"})


def test_a_models_own_scheduler_has_its_name() -> None:
    assert own_name("EulerDiscreteScheduler", {"timestep_spacing": "leading"}) == "euler"
    assert own_name("EulerDiscreteScheduler", {"timestep_spacing": "trailing"}) == "euler_trailing"
    assert own_name("UniPCMultistepScheduler", {"use_flow_sigmas": True}) == "unipc"
    assert own_name("FlowMatchEulerDiscreteScheduler", {}) == "euler"
    assert own_name("HeunDiscreteScheduler", {}) == ""


@pytest.mark.parametrize("name", ["FluxTransformer2DModel", "WanTransformer3DModel", "ZImageTransformer2DModel"])
def test_families_name_known_schedulers(name: str) -> None:
    spec = load_spec(name)
    assert spec.schedules
    assert set(spec.schedulers) <= set(FLOW)
