"""Distillation to few steps has a teacher's lessons, and exports an adapter."""

import argparse
import copy
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.flux.pipeline_flux import calculate_shift

from training.evaluate import load
from training.flux_shapes import few_steps
from training.flux_shapes.data import MAIN_SIZE
from training.flux_shapes.few_steps import NAME, Lessons, noise_levels, with_adapter
from training.flux_shapes.train import start
from training.latents import pack, unpack

SMALL = (64, 64)


def test_tokens_are_unpacked_as_they_were_packed() -> None:
    latents = torch.randn(2, 16, 8, 12)
    assert torch.equal(unpack(pack(latents), 8, 12), latents)


@pytest.mark.parametrize("num_steps", [4, 20])
def test_noise_levels_are_those_of_the_pipeline(num_steps: int) -> None:
    scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(few_steps.CHECKPOINT / "scheduler")
    scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / num_steps, num_steps), mu=calculate_shift(64))
    torch.testing.assert_close(noise_levels(MAIN_SIZE, num_steps), scheduler.sigmas)
    torch.testing.assert_close(noise_levels(MAIN_SIZE, num_steps), noise_levels(MAIN_SIZE, 5 * num_steps)[::5])


@pytest.fixture(scope="module")
def lessons_of() -> Callable[[int], Lessons]:
    """Return two lessons for each of two steps, by a teacher with this many steps between."""
    options = {"seed": 0, "captions": 20, "batch": 2, "num_steps": 2, "refresh_every": 100}
    teacher, tokenizers = start(few_steps.CHECKPOINT)
    student = with_adapter(copy.deepcopy(teacher), rank=2)

    def make(teacher_steps: int) -> Lessons:
        args = argparse.Namespace(**options, teacher_steps=teacher_steps, tokenizers=tokenizers)
        torch.manual_seed(0)
        lessons = Lessons(teacher.eval(), student.eval(), args, "cpu")
        lessons.refresh(SMALL)
        return lessons

    return make


def test_a_teacher_of_as_many_steps_has_nothing_to_teach(
    lessons_of: Callable[[int], Lessons], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own velocity is the mean one; with more steps it is another, which the adapter can learn."""
    monkeypatch.setattr(Lessons, "next_size", lambda self: SMALL)
    same, finer = lessons_of(2), lessons_of(4)
    for lessons in (same, finer):
        lessons.calls = 1
    assert same.loss().item() < 1e-8
    error = finer.loss()
    assert error.item() > 1e-4
    error.backward()  # type: ignore[no-untyped-call]
    parameters = finer.student.named_parameters()
    assert {name.split(".")[-3] for name, x in parameters if x.grad is not None} == {"lora_A", "lora_B"}


def test_half_of_the_lessons_start_where_the_student_came(lessons_of: Callable[[int], Lessons]) -> None:
    first, second = lessons_of(4).store[SMALL]
    way = (second.sigma_B - first.sigma_B)[0]
    taught = first.latents_BCHW + way * unpack(first.velocity_BSD, 8, 8)
    torch.testing.assert_close(second.latents_BCHW[1], taught[1])
    assert not torch.allclose(second.latents_BCHW[0], taught[0], atol=1e-3)


def test_what_is_exported_is_an_adapter_of_diffusers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = "--max-steps 1 --batch 2 --captions 20 --rank 2 --teacher-steps 4 --num-steps 2"
    folders = ["--out", str(tmp_path / "run"), "--export", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["few_steps", *folders, *options.split()])
    few_steps.main()
    pipeline = load("flux-shapes", adapter=tmp_path / f"{NAME}.safetensors")
    (loaded,) = pipeline.get_list_adapters().values()
    assert len(loaded) == 1
    changed = [x for name, x in pipeline.transformer.named_parameters() if "lora_B" in name]
    assert all(x.isfinite().all() for x in changed)
    assert sum(bool(x.any()) for x in changed) > len(changed) / 2
