"""``troupe estimate`` prints table and document for shipped, published and own models, and refuses mistakes."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.pipelines.ltx2.latent_upsampler import LTX2LatentUpsamplerModel
from typer.testing import Result

from pipelines.blocks.opened import OpenedPipeline
from pipelines.loading import PUBLISHED, published_models
from tests.deployments.support.commands import troupe
from tests.pipelines.support.checkpoints import tiny_animate


@pytest.fixture(autouse=True)
def data_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TROUPE_DATA_DIR", str(tmp_path / "data"))
    return tmp_path / "data"


def estimate(*args: str) -> Result:
    return troupe("estimate", *args)


def document(*args: str) -> dict[str, Any]:
    result = estimate(*args, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_the_table_shows_every_candidate_and_why_one_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    make, made = OpenedPipeline._part_outline, list[str]()
    monkeypatch.setattr(OpenedPipeline, "_part_outline", lambda own, name: made.append(name) or make(own, name))  # type: ignore[func-returns-value]
    result = estimate("--model", "FLUX.1-dev", "--size", "1024x1024", "--ranks", "4", "--machine", "h200")
    assert result.exit_code == 0, result.output
    assert made.count("vae") == 1, "an outline of some models takes half a second"
    for part in ("ulysses4 *", "ring4", "allgather_kv4", "tensor4", "pipeline4", "512 text + 4096 image", "GiB"):
        assert part in result.output
    assert "* ulysses4: the fastest of 14" in result.output
    assert re.search(
        r"asleep \(share\): [\d.]+ GiB of pinned .* exceeds host_memory_gib .* page cache, slower", result.output
    )
    assert "all_to_all/4: 12.0 us + 320 GB/s" in result.output


def test_a_published_model_by_its_hub_id_with_its_branches_and_frames() -> None:
    found = document(
        "--model", "Wan-AI/Wan2.1-T2V-14B-Diffusers", "--size", "832x480", "--frames", "81", "--ranks", "4"
    )
    assert found["tokens"] == {"video": 21 * 30 * 52}
    assert found["num_branches"] == 2
    assert found["chosen"].startswith("guidance2x")
    by_name = {candidate["strategy"]: candidate for candidate in found["candidates"]}
    assert by_name["tensor4"]["memory_bytes"] < 0.6 * by_name["ulysses4"]["memory_bytes"], "weights are divided"
    alone = document("--model", "Wan2.1-T2V-14B", "--size", "832x480", "--no-guidance", "--ranks", "4")
    assert not any("guidance" in candidate["strategy"] for candidate in alone["candidates"])


KEYFRAME = 16 * 24
"""Tokens of a frame of latents at 768x512: LTX-2 has one for 32 x 32 pixels, and its first picture adds none."""


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("FLUX.2-klein-4B", {"1 picture": 2 * 4096, "4 pictures": 5 * 4096}),
        ("FLUX.1-Kontext-dev", {"1 picture": 2 * 4096}),
        ("Qwen-Image-Edit-2509", {"3 pictures": 4 * 83 * 83}),
        ("LTX-2", {"8 pictures": 6144 + 7 * KEYFRAME, "a clip of 121 frames": 2 * 6144}),
        ("FLUX.1-dev", {}),
        ("Wan2.2-TI2V-5B", {}),
    ],
)
def test_tokens_of_what_comes_along_are_counted(model: str, expected: dict[str, int]) -> None:
    """FLUX.1-dev and Wan start from a picture, which adds no tokens."""
    found = document("--model", model, "--machine", "h200")
    inputs = {one["name"]: one for one in found["inputs"]}
    assert {name: one["tokens"].get("image") or one["tokens"].get("video") for name, one in inputs.items()} == expected
    plain = next(one for one in found["candidates"] if one["strategy"] == found["chosen"])
    for one in inputs.values():
        assert one["step_ms"] > plain["total_ms"]
        assert one["rank_bytes"] > plain["memory_bytes"]


def test_what_comes_along_is_in_the_table() -> None:
    told = estimate("--model", "FLUX.2-klein-4B", "--machine", "h200").stdout
    assert all(f"with {name}: " in told for name in ("1 picture", "4 pictures"))


def test_weights_are_divided_where_whole_ones_do_not_fit(tmp_path: Path) -> None:
    from dataclasses import replace

    from engines.planner.machine import H200

    small = tmp_path / "small.json"
    small.write_text(replace(H200, name="small", memory_bytes=20 * 2**30).to_json())
    found = document("--model", "FLUX.1-dev", "--ranks", "4", "--machine", str(small))
    assert "tensor" in found["chosen"]
    assert "fits 90% of 20.0 GiB" in found["reason"]


def test_quantised_linears_are_faster_and_take_the_place_of_the_others() -> None:
    native, fp8 = (document("--model", "FLUX.1-dev", "--precision", name) for name in ("native", "fp8"))
    assert fp8["candidates"][0]["products_ms"] < 0.8 * native["candidates"][0]["products_ms"]
    assert fp8["candidates"][0]["memory_bytes"] < 0.7 * native["candidates"][0]["memory_bytes"]


FLUX_1, KLEIN = ("--model", "FLUX.1-dev"), ("--model", "FLUX.2-klein-4B")
SQUARE = ("--size", "1024x1024")
CLIP = ("--model", "HunyuanVideo-1.5-480p_t2v", "--size", "848x480x121")


@pytest.mark.parametrize(
    ("args", "measured_s"),
    [
        ((*FLUX_1, *SQUARE, "--steps", "28", "--machine", "h200"), 3.51),
        ((*FLUX_1, *SQUARE, "--steps", "28", "--machine", "h200", "--ranks", "2"), 2.05),
        ((*FLUX_1, *SQUARE, "--steps", "28", "--machine", "h100", "--ranks", "4"), 1.15),
        ((*KLEIN, *SQUARE, "--steps", "4", "--machine", "h100"), 0.38),
        ((*CLIP, "--steps", "8", "--machine", "h200"), 41.7),
    ],
)
def test_a_whole_picture_or_clip_takes_about_what_was_measured(args: tuple[str, ...], measured_s: float) -> None:
    """Times through HTTP are within a quarter: benchmarks/reports/application_one_h200_2026-11-24.md,
    application_h200_2026-11-23.md, quad_h100_2026-11-26.md and sweep.jsonl."""
    request = document(*args)["request"]
    assert request["total_s"] == pytest.approx(measured_s, rel=0.25)
    encode_s = request["encode_s"] or 0.0  # some encoders' size is in no configuration
    parts = encode_s + request["num_steps"] * request["step_s"] + request["decode_s"]
    assert request["total_s"] == pytest.approx(parts)
    assert "waiting" in request["not_counted"]


@pytest.mark.parametrize(
    ("args", "measured_gib"),
    [
        ((*FLUX_1, "--machine", "h200", "--ranks", "2"), 42.4),
        ((*KLEIN, "--machine", "h100"), 29.1),
        (("--model", "HunyuanVideo-1.5-480p_t2v", "--machine", "h200"), 50.5),
    ],
)
def test_parts_together_take_no_more_than_was_held(args: tuple[str, ...], measured_gib: float) -> None:
    """The first GPU of the whole application held it, with its allocators' reserves; the same reports."""
    memory = document(*args)["memory"]
    assert 0.65 * measured_gib < memory["total_gib"] <= measured_gib
    assert sum(memory["gib"].values()) == pytest.approx(memory["total_gib"])


def test_ranks_that_decode_have_memory_for_it(tmp_path: Path) -> None:
    """Between a clip's segments each rank decodes the last one, beside the decoder's own GPU memory."""
    small = tiny_animate.wan_animate2(tmp_path / "small")
    folder = str(tiny_animate.without_weights(small, tmp_path / "full"))
    one, two = (document("--model", folder, "--machine", "h200", "--frames", str(number)) for number in (81, 161))
    for found in (one["memory"], two["memory"]):
        assert found["gib"]["rank: vae"] == found["gib"]["decoder: vae"] > 0.2
        assert sum(found["gib"].values()) == pytest.approx(found["total_gib"])
    assert "rank: decode" not in one["memory"]["gib"]
    assert two["memory"]["gib"]["rank: decode"] == two["memory"]["gib"]["decode"] > 1


def test_a_model_that_fits() -> None:
    result = estimate(*KLEIN, "--machine", "rtx-4090")
    assert result.exit_code == 0, result.output
    assert "fits 23.7 GiB a GPU (21.3 of them usable): 21." in result.output
    assert "published, not measured" in result.output
    assert "published in: NVIDIA Ada GPU architecture white paper" in result.output


def test_what_does_not_fit_does_with_the_change_that_is_named() -> None:
    """The suggested division is estimated by itself, with what the change leaves on the GPU."""
    memory = document(*FLUX_1, "--machine", "rtx-4090")["memory"]
    assert not memory["fits"]
    assert "does not fit 23.7 GiB a GPU (21.3 of them usable)" in memory["sentence"]
    change = memory["changes"][0]
    assert change["words"] == ["denoiser.precision: fp8", "text_encoder.num_gpus: 0, on slow CPU cores"]
    assert " and ".join(change["words"]) in memory["sentence"]
    again = document(*FLUX_1, "--machine", "rtx-4090", "--precision", "fp8")
    (rank,) = (one["memory_bytes"] / 2**30 for one in again["candidates"])
    gib = again["memory"]["gib"]
    two_processes = gib["processes"] * 2 / 3
    decoder = gib["decoder: vae"] + gib["decoder: compile"] + gib["decode"]
    assert change["gib"] == pytest.approx(rank + decoder + two_processes, abs=0.01)
    assert change["gib"] <= memory["usable_gib"]


def test_any_number_of_ranks_without_nvlink() -> None:
    found = document(*FLUX_1, "--ranks", "3", "--machine", "L40S")
    assert found["num_ranks"] == 3
    assert {"ulysses3", "pipeline3"} <= {one["strategy"] for one in found["candidates"]}
    assert found["machine"]["source"] == "NVIDIA L40S data sheet"


def test_steps_size_and_frames_are_the_models_own() -> None:
    found = document("--model", "Wan2.1-T2V-1.3B", "--machine", "h200")
    assert (found["size"], found["num_frames"], found["request"]["num_steps"]) == ("832x480", 81, 50)


def test_nothing_is_printed_but_the_document() -> None:
    """It runs in its own process: libraries warn once, when imported."""
    command = [sys.executable, "-m", "deployments.cli.main", "estimate", *KLEIN, "--machine", "h200", "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.stderr == ""
    assert json.loads(ended.stdout)["model"] == "FLUX.2-klein-4B"


def test_a_measurement_is_kept_and_used_again(data_dir: Path) -> None:
    fp8 = ("--model", "flux-shapes", "--ranks", "2", "--attention", "fp8")
    measured = document(*fp8, "--size", "128x128", "--measure")
    (file,) = (data_dir / "machines").iterdir()
    assert str(file) in measured["origin"]
    assert measured["machine"]["name"].startswith("cpu")
    assert (measured["attention"], measured["machine"]["attention_precision"]) == ("fp8", "fp8")
    again = document(*fp8, "--dtype", "float32")
    assert again["machine"] == measured["machine"]
    by_file = document("--model", "flux-shapes", "--ranks", "2", "--machine", str(file))
    assert by_file["machine"] == measured["machine"]
    in_float8 = estimate("--model", "flux-shapes", "--machine", str(file)).output
    assert "attention auto (its time is that of fp8: no other is known)" in in_float8
    other = estimate("--model", "flux-shapes", "--ranks", "2", "--attention", "fp8", "--machine", "h200").output
    assert "linears native, attention fp8 (its time is that of auto: no other is known)" in other


def test_a_folder(pictures: Path) -> None:
    assert document("--model", str(pictures), "--size", "64x64")["tokens"]["image"] == 64


ALONE = ("stable-diffusion-3.5-medium", "stable-diffusion-xl-base-1.0")
"""Models with one rank a gang."""
QUICK = ("ERNIE-Image", "Helios-Base", "Qwen-Image-2.1", "Z-Image")
"""Models whose forwards need values that "meta" tensors lack, and one with another model's architecture."""


@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(one, marks=pytest.mark.slow) for one in published_models() if one not in QUICK)]
)
def test_every_published_model_is_known(name: str) -> None:
    if name in ALONE:
        assert f"divide {CLASSES[name]} over 2 ranks" in mistake("--model", name, "--ranks", "2")
        return
    found = document("--model", name, "--ranks", "2", "--machine", "h200")
    assert max(found["tokens"].values()) > 1000
    assert found["candidates"][0]["total_ms"] > 1
    assert found["chosen"] != "single"


CLASSES = dict(zip(ALONE, ("SD3Transformer2DModel", "UNet2DConditionModel"), strict=True))


@pytest.mark.slow
def test_a_model_whose_tokens_are_not_divided_is_given_no_such_way() -> None:
    alone = document("--model", "stable-diffusion-3.5-medium", "--ranks", "1", "--machine", "h200")
    assert [one["strategy"] for one in alone["candidates"]] == ["single"]


@pytest.mark.parametrize(
    ("model", "weights", "gib", "parts"),
    [
        ("stable-diffusion-xl-base-1.0", "2.6 B parameters, 4.8 GiB on the one rank", 4.8, "and fit 139.0 GiB"),
    ],
)
def test_of_a_model_whose_steps_nobody_knows_it_says_what_it_weighs(
    model: str, weights: str, gib: float, parts: str
) -> None:
    told = estimate("--model", model)
    assert told.exit_code == 0, told.output
    first, second, last = told.stdout.splitlines()
    assert first == f"{model}, bfloat16: {weights}"
    assert second.startswith("weights of all parts and their processes take ")
    assert parts in second
    assert last == f"no time: a step of {model} is not known before there is a request"
    found = document("--model", model)
    assert found["weight_bytes"] / 2**30 == pytest.approx(gib, abs=0.05)
    assert (found["candidates"], found["chosen"], found["num_ranks"]) == ([], None, 1)


def test_guidance_of_a_published_model_is_its_own() -> None:
    found = {
        name: document("--model", name, "--ranks", "1", "--machine", "h200") for name in ("Z-Image", "Z-Image-Turbo")
    }
    assert {name: one["num_branches"] for name, one in found.items()} == {"Z-Image": 2, "Z-Image-Turbo": 1}


def mistake(*args: str) -> str:
    result = estimate(*args)
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.splitlines()
    return line


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--model", "nonsense"], "or the name of a published model: Cosmos3-Nano"),
        (["--model", "flux-shapes", "--size", "big"], "size 'big': write it as WIDTHxHEIGHT"),
        (["--model", "FLUX.1-dev", "--size", "1000x1024"], "positive multiples of 16"),
        (["--model", "flux-shapes", "--ranks", "0"], "--ranks is 0; it must be at least 1"),
        (["--model", "flux-shapes", "--attention", "fp4"], "attention is 'fp4'; it must be auto or fp8"),
        (["--model", "flux-shapes", "--steps", "0"], "num_inference_steps is 0; it must be from 1 to"),
        (["--model", "flux-shapes", "--memory", "0"], "--memory is 0; it must be above 0, in GiB a GPU"),
        (
            ["--model", "FLUX.1-dev", "--machine", "a100", "--precision", "fp8"],
            "no rate in precision fp8 is known of A100",
        ),
        (["--model", "flux-shapes", "--precision", "fp3"], "no rate in precision fp3 is known of H200"),
        (
            ["--model", "flux-shapes", "--machine", "abacus"],
            "abacus is no file, and no known machine; known: h200, b200",
        ),
    ],
)
def test_mistakes_are_one_line(args: list[str], message: str) -> None:
    assert message in mistake(*args)


def test_a_file_that_holds_no_figures(tmp_path: Path) -> None:
    file = tmp_path / "machine.json"
    file.write_text("{}")
    assert "holds no machine's figures" in estimate("--model", "flux-shapes", "--machine", str(file)).stderr


SIGMAS = "0.909375,0.725,0.421875"


def test_a_latent_upsampler_is_in_the_memory_of_every_rank(tmp_path: Path) -> None:
    """This holds for requests of one pass too: a rank reads it at its start."""
    with torch.device("meta"):
        weights = LTX2LatentUpsamplerModel().bfloat16().parameters()
    own_gib = sum(weight.nbytes for weight in weights) / 2**30
    plain_folder = tmp_path / "LTX-2"
    shutil.copytree(PUBLISHED / "LTX-2", plain_folder, ignore=shutil.ignore_patterns("latent_upsampler"))
    plain, found = (
        document("--model", name, "--machine", "h200", "--ranks", "2", "--memory", "141")
        for name in (str(plain_folder), "LTX-2")
    )
    assert found["memory"]["gib"]["rank: latent_upsampler"] == pytest.approx(own_gib)
    assert found["memory"]["total_gib"] - plain["memory"]["total_gib"] == pytest.approx(own_gib)
    assert found["memory"]["asleep"]["host_gib"] - plain["memory"]["asleep"]["host_gib"] == pytest.approx(2 * own_gib)
    held = [one["budgets"]["lossless"]["estimated_gib"] for one in (plain, found)]
    assert held[1] - held[0] == pytest.approx(own_gib, abs=0.01)
    assert found["request"] == plain["request"]


def test_both_passes_of_a_request_are_counted() -> None:
    """Steps of the first pass equal those of a clip with half the sides; those of the second have no guidance."""
    named = ("--model", "LTX-2", "--machine", "h200")
    two = document(*named, "--size", "1536x1024", "--second-stage-sigmas", SIGMAS)
    small, large = document(*named), document(*named, "--size", "1536x1024", "--no-guidance")
    request, memory = two["request"], two["memory"]["gib"]
    assert (request["num_steps"], request["second_num_steps"]) == (30, 3)
    assert request["step_s"] == small["request"]["step_s"]
    assert request["second_step_s"] == large["request"]["step_s"] > small["request"]["step_s"]
    steps_s = 30 * request["step_s"] + 3 * request["second_step_s"]
    assert request["total_s"] == pytest.approx(request["encode_s"] + steps_s + request["decode_s"])
    assert memory["steps"] == large["memory"]["gib"]["steps"] > small["memory"]["gib"]["steps"]
    assert request["decode_s"] == large["request"]["decode_s"]
    usual = estimate(*named, "--second-stage-sigmas", SIGMAS).stdout
    each_ms = (1e3 * request["step_s"], 1e3 * request["second_step_s"])
    assert "LTX-2, 1536x1024, 121 frames" in usual
    assert "30 steps x {:.1f} ms + 3 steps x {:.1f} ms".format(*each_ms) in usual


def test_a_second_pass_without_an_upsampler_is_a_mistake() -> None:
    result = estimate("--model", "Wan2.1-T2V-1.3B", "--second-stage-sigmas", SIGMAS)
    assert result.exit_code != 0
    assert "need a model with a latent upsampler" in result.output
