"""What the gang's tests check again and again."""

from __future__ import annotations

import asyncio
import re

import httpx
import ray
import torch

from engines.gang.gang import Gang
from tests.engines.gang.support.fakes import FakeRequest, fake_job, reference_latents
from tests.engines.gang.support.helpers import eventually, latents


def assert_equal(left: torch.Tensor, right: torch.Tensor) -> None:
    torch.testing.assert_close(left, right, rtol=0, atol=0)


async def assert_unharmed(gang: Gang, job_id: str) -> None:
    """The next job equals its reference, and the ranks hold nothing when it is done."""
    request = FakeRequest(seed=7, num_steps=4)
    assert_equal(await latents(gang, fake_job(job_id, request)), reference_latents(request))
    await eventually(lambda: held_jobs(gang) == [(), ()])


def held_jobs(gang: Gang) -> list[tuple[str, ...]]:
    return ray.get([rank.held_jobs.remote() for rank in gang._ranks])


async def assert_unharmed_meanwhile(gang: Gang, pending: asyncio.Future[torch.Tensor]) -> None:
    request = FakeRequest(seed=5, num_steps=3)
    assert_equal(await latents(gang, fake_job("meanwhile", request)), reference_latents(request))
    assert not pending.done(), "a job whose conditioning is not there yet does not stop the others"


def metric_names(model: str) -> set[str]:
    """The series of a model on Ray's page for Prometheus, with the labels that tell them apart."""
    node = ray.nodes()[0]
    page = httpx.get(f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics").text
    lines = [line for line in page.splitlines() if line.startswith("ray_troupe_") and f'model="{model}"' in line]
    labels = re.compile(r'(num_ranks|outcome)="([^"]*)"')
    return {" ".join([line.partition("{")[0], *(value for _, value in labels.findall(line))]) for line in lines}
