"""The whole application is killed in the middle of a clip; started again, it finishes the clip."""

from __future__ import annotations

from pathlib import Path

import httpx

from tests.deployments.commands import SERVING, command, config_file, short_folder
from tests.deployments.live import PROMPT, TIMEOUT_S, config_of, wait_until

JOB = {"prompt": PROMPT, "seed": 3, "num_inference_steps": 60}


def status(http: httpx.Client, job_id: str) -> dict[str, object]:
    return dict(http.get(f"/v1/videos/{job_id}").raise_for_status().json())


def finish(http: httpx.Client, job_id: str) -> bytes:
    wait_until(lambda: status(http, job_id)["status"] in ("completed", "failed"), "the clip", TIMEOUT_S)
    assert status(http, job_id)["status"] == "completed", status(http, job_id)
    return http.get(f"/v1/videos/{job_id}/content").raise_for_status().content


def test_a_clip_outlives_the_application(clips: Path):
    with short_folder() as folder:
        check_that_a_clip_outlives_the_application(("serve", config_file(config_of({"clips": clips}), folder)), folder)


def check_that_a_clip_outlives_the_application(serve: tuple[str, str], folder: Path) -> None:
    with command(*serve, folder=folder) as first:
        with httpx.Client(base_url=first.wait_for(SERVING), timeout=TIMEOUT_S) as http:
            job_id = str(http.post("/v1/videos", json=JOB).raise_for_status().json()["id"])
            wait_until(lambda: int(str(status(http, job_id)["progress"])) >= 20, "some progress", TIMEOUT_S)
        first.kill_all()
    with (
        command(*serve, folder=folder) as second,
        httpx.Client(base_url=second.wait_for(SERVING), timeout=TIMEOUT_S) as http,
    ):
        undisturbed = str(http.post("/v1/videos", json=JOB).raise_for_status().json()["id"])
        assert finish(http, job_id) == finish(http, undisturbed)
        assert second.interrupt() == 130
