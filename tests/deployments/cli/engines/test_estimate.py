"""``troupe estimate`` for shipped, published and own models: the table, the document, and mistakes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from pipelines.loading import published_models
from tests.deployments.support.commands import troupe


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


def test_the_table_shows_every_candidate_and_why_one_was_chosen() -> None:
    result = estimate("--model", "FLUX.1-dev", "--size", "1024x1024", "--ranks", "4", "--machine", "h200")
    assert result.exit_code == 0, result.output
    for part in ("ulysses4 *", "ring4", "allgather_kv4", "tensor4", "pipeline4", "512 text + 4096 image", "GiB"):
        assert part in result.output
    assert "* ulysses4: the fastest of 14" in result.output
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


def test_weights_are_divided_where_whole_ones_do_not_fit(tmp_path: Path) -> None:
    from dataclasses import replace

    from engines.planner.machines import H200

    small = tmp_path / "small.json"
    small.write_text(replace(H200, name="small", memory_bytes=20 * 2**30).to_json())
    found = document("--model", "FLUX.1-dev", "--ranks", "4", "--machine", str(small))
    assert "tensor" in found["chosen"]
    assert "fits 90% of 20.0 GiB" in found["reason"]


def test_quantised_linears_are_faster_and_lie_beside_the_others() -> None:
    native, fp8 = (document("--model", "FLUX.1-dev", "--precision", name) for name in ("native", "fp8"))
    assert fp8["candidates"][0]["products_ms"] < 0.8 * native["candidates"][0]["products_ms"]
    assert fp8["candidates"][0]["memory_bytes"] > native["candidates"][0]["memory_bytes"]


def test_a_measurement_is_kept_and_used_again(data_dir: Path) -> None:
    measured = document("--model", "flux-shapes", "--size", "128x128", "--ranks", "2", "--measure")
    (file,) = (data_dir / "machines").iterdir()
    assert str(file) in measured["origin"]
    assert measured["machine"]["name"].startswith("cpu")
    again = document("--model", "flux-shapes", "--ranks", "2", "--dtype", "float32")
    assert again["machine"] == measured["machine"]
    by_file = document("--model", "flux-shapes", "--ranks", "2", "--machine", str(file))
    assert by_file["machine"] == measured["machine"]


def test_a_folder(pictures: Path) -> None:
    assert document("--model", str(pictures), "--size", "64x64")["tokens"]["image"] == 64


ALONE = ("ideogram-4", "stable-diffusion-3.5-medium", "stable-diffusion-xl-base-1.0")
"""On one rank a gang."""
QUICK = ("ERNIE-Image", "Helios-Base", "Qwen-Image-2.1", "Z-Image")
"""Those whose forwards ask for what "meta" tensors have not, and one of another model's architecture."""


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


CLASSES = dict(
    zip(ALONE, ("Ideogram4Transformer2DModel", "SD3Transformer2DModel", "UNet2DConditionModel"), strict=True)
)


@pytest.mark.slow
def test_a_model_whose_tokens_are_not_divided_is_given_no_such_way() -> None:
    alone = document("--model", "stable-diffusion-3.5-medium", "--ranks", "1", "--machine", "h200")
    assert [one["strategy"] for one in alone["candidates"]] == ["single"]


@pytest.mark.parametrize(
    ("model", "weights", "gib"),
    [
        ("stable-diffusion-xl-base-1.0", "2.6 B parameters, 4.8 GiB on the one rank", 4.8),
        ("ideogram-4", "18.6 B parameters, 34.6 GiB on the one rank", 34.6),
    ],
)
def test_of_a_model_whose_steps_nobody_knows_it_says_what_it_weighs(model: str, weights: str, gib: float) -> None:
    told = estimate("--model", model)
    assert told.exit_code == 0, told.output
    assert told.stdout.splitlines() == [
        f"{model}, bfloat16: {weights}",
        f"no time: a step of {model} is not known before there is a request",
    ]
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
        (["--model", "FLUX.1-dev", "--size", "big"], "size 'big': write it as WIDTHxHEIGHT"),
        (["--model", "FLUX.1-dev", "--size", "1000x1024"], "positive multiples of 16"),
        (["--model", "FLUX.1-dev", "--ranks", "0"], "--ranks is 0; it must be at least 1"),
        (["--model", "FLUX.1-dev", "--ranks", "3"], "was not measured with all_gather over 3 ranks; measured:"),
        (["--model", "FLUX.1-dev", "--precision", "fp3"], "was not measured in precision fp3; measured: native, fp8"),
        (["--model", "FLUX.1-dev", "--machine", "abacus"], "abacus is no file, and no known machine; known: h200"),
    ],
)
def test_mistakes_are_one_line(args: list[str], message: str) -> None:
    assert message in mistake(*args)


def test_a_file_that_holds_no_figures(tmp_path: Path) -> None:
    file = tmp_path / "machine.json"
    file.write_text("{}")
    assert "holds no machine's figures" in estimate("--model", "FLUX.1-dev", "--machine", str(file)).stderr
