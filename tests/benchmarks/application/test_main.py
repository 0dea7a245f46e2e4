"""The application is measured with the model that was asked for, and answers say where their time went."""

from __future__ import annotations

from pathlib import Path

import httpx

from benchmarks.application.__main__ import config_for, medians, timing


def test_the_shipped_configuration_serves_the_folder_alone() -> None:
    (model,) = config_for("gpu2", Path("/somewhere")).app.models
    (own, *_) = config_for("gpu2", Path("/elsewhere")).app.models
    assert (model.path, model.name) == ("/somewhere", "full")
    assert model.denoiser == own.denoiser
    assert model.denoiser.num_ranks == 2


def test_timings_are_read_from_the_answer() -> None:
    header = "queue;dur=1.0, encode;dur=2.5, denoise;dur=3, decode;dur=4, total;dur=10.5"
    one = timing(httpx.Response(200, headers={"server-timing": header}))
    assert one == {"queue": 1.0, "encode": 2.5, "denoise": 3.0, "decode": 4.0, "total": 10.5}
    other = {**one, "denoise": 5.0}
    assert medians([one, other, other])["denoise"]["median"] == 5.0
