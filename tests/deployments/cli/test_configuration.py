"""``troupe serve MODEL`` makes the configuration of the shipped ones for GPUs, and warns of problems."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NoReturn

import pytest
import torch
import yaml
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from deployments.cli import progress
from deployments.cli.configuration import config_for, to_yaml
from deployments.cli.preflight import warnings
from deployments.cli.serving import load_config, parse_config
from deployments.config import ServeConfig
from pipelines.loading import HUB_IDS, PUBLISHED, SHIPPED, ModelSource, hub_id_of, published_models
from tests.deployments.support.commands import assert_one_line, config_file, troupe

FLUX, KLEIN, WAN = "FLUX.1-dev", "FLUX.2-klein-4B", "Wan2.1-T2V-14B"


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8, None])
def test_is_the_shipped_one_for_as_many_gpus(num_ranks: int | None) -> None:
    (made,) = config_for(FLUX, num_ranks).app.models
    (shipped,) = load_config(f"gpu{num_ranks or 4}").app.models
    assert made.model_dump(exclude={"name"}) == shipped.model_dump(exclude={"name"})


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize("name", [KLEIN, KLEIN.lower(), WAN, str(SHIPPED / "wan-shapes"), "owner/name"])
def test_printed_it_is_read_as_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "owner/name":
        monkeypatch.setattr("deployments.cli.configuration.resolve_configuration", lambda _: SHIPPED / "flux-shapes")
        monkeypatch.setattr("pipelines.checkpoint.resolve_configuration", lambda _: SHIPPED / "flux-shapes")
    made = config_for(name, 2)
    printed = to_yaml(made)
    assert parse_config(yaml.safe_load(printed)) == made
    assert yaml.safe_load(printed)["applications"][0]["args"]["models"][0]["denoiser"]["num_ranks"] == 2
    assert not list(warnings(made))


@pytest.mark.parametrize("num_gpus", [0, 2])
def test_has_the_whole_path_of_a_folder(num_gpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A printed configuration may be served from another working directory."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.chdir(SHIPPED.parent)
    (model,) = config_for(f"{SHIPPED.name}/flux-shapes").app.models
    assert (model.name, model.path) == ("flux-shapes", str(SHIPPED / "flux-shapes"))


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize(("name", "compiles"), [(WAN, True), ("LTX-2", True), (str(PUBLISHED / "MiniMax-H3"), False)])
def test_asks_a_decoder_for_nothing_that_it_cannot_do(name: str, compiles: bool) -> None:
    decoder = config_for(name).app.models[0].decoder
    assert (decoder.compile, decoder.memory_gib, decoder.num_gpus) == (compiles, None, 0.1)


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize(("num_ranks", "count"), [(1, 1), (2, 2), (3, 3), (4, 4), (8, 6)])
def test_all_gpus_of_a_gang_decode_a_clip_that_has_rows_enough(num_ranks: int, count: int) -> None:
    """The default of 720 rows of pixels is six times 120."""
    (model,) = config_for(WAN, num_ranks).app.models
    assert model.decoder.num_devices == count


def test_has_cpu_ranks_without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    shown = troupe("serve", "flux-shapes", "--ranks", "3", "--port", "9001", "--print-config")
    assert shown.exit_code == 0, shown.output
    config = parse_config(yaml.safe_load(shown.stdout))
    (model,) = config.app.models
    assert (model.path, model.denoiser.num_ranks, model.denoiser.gpus_per_rank) == ("flux-shapes", 3, 0)
    assert config.http_options.port == 9001


def test_has_the_memory_of_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    shown = troupe("serve", KLEIN, "--memory", "12", "--allow-quantization", "--print-config")
    assert shown.exit_code == 0, shown.output
    (model,) = parse_config(yaml.safe_load(shown.stdout)).app.models
    assert (model.memory_gib, model.allow_quantization, model.denoiser.gpus_per_rank) == (12, True, 0.8)
    assert_one_line(troupe("serve", KLEIN, "--memory", "0", "--print-config"), "it must be above 0, in GiB a GPU")
    assert_one_line(troupe("serve", "laptop", "--memory", "8", "--print-config"), "laptop is a config: change it")
    assert_one_line(troupe("serve", KLEIN, "--allow-quantization", "--print-config"), "without memory_gib")


def test_takes_one_file_beside_its_base(tmp_path: Path) -> None:
    file = tmp_path / "my tune.safetensors"
    file.touch()
    (model,) = config_for(f"{file}@flux-shapes", 1).app.models
    assert (model.name, model.path, model.base) == ("my-tune", str(file), "flux-shapes")
    (model,) = config_for(source := f"{file}@flux-shapes+controlnet@{tmp_path}", 1).app.models
    assert (model.base, model.controlnet, model.source) == ("flux-shapes", str(tmp_path), source)


def test_takes_the_workflow_behind_a_name() -> None:
    (model,) = config_for(source := f"{PUBLISHED / 'MiniMax-H3'}+workflow@ref2va", 1).app.models
    assert (model.name, model.path, model.workflow) == ("MiniMax-H3-ref2va", str(PUBLISHED / "MiniMax-H3"), "ref2va")
    assert model.source == source


@pytest.mark.usefixtures("gpus")
def test_steps_with_many_references_are_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 9 pictures a step takes 78 s on one H200 by ``troupe estimate --model MiniMax-H3+workflow@ref2va``."""
    monkeypatch.setattr("huggingface_hub.utils._cache_assets.HF_ASSETS_CACHE", str(tmp_path))
    plain = str(PUBLISHED / "MiniMax-H3")
    names = (plain, str(ModelSource(base=plain, workflow="ref2va")))
    usual_s, long_s = (config_for(name, 1).app.models[0].denoiser.step_deadline_s for name in names)
    assert usual_s < 78 < long_s / 3


def test_a_config_is_a_config_still(tmp_path: Path) -> None:
    assert config_for("laptop") == load_config("laptop")
    assert_one_line(troupe("serve", "laptop", "--ranks", "2", "--print-config"), "--ranks is for a model", "num_ranks")
    assert_one_line(troupe("serve", str(tmp_path / "no.yaml")), "neither a file nor a shipped config")
    assert_one_line(troupe("serve", "nothing"), "neither a file nor a shipped config", "nor a model", KLEIN)
    assert_one_line(troupe("serve", "flux-shapes", "--ranks", "0"), "it must be at least 1")


def test_hub_ids_are_of_published_models() -> None:
    known = json.loads(HUB_IDS.read_text())
    for name in published_models():
        if name in known:
            validate_repo_id(hub_id := hub_id_of(name))
            assert hub_id.split("/")[1].lower().removesuffix("-diffusers") == name.lower()
        else:
            with pytest.raises(ValueError, match=f"{name} is known by its configuration alone: give its hub id"):
                hub_id_of(name)


def test_warns_of_stages_on_cpu_cores_beside_ranks_with_gpus() -> None:
    gang = {"num_ranks": 1, "gpus_per_rank": 1}
    (warning,) = warnings(config_with(denoiser=gang))
    assert "text_encoder and decoder on CPU cores" in warning
    (warning,) = warnings(config_with(denoiser=gang, text_encoder={"num_gpus": 0.1}))
    assert "GPUs, and decoder on CPU" in warning
    (warning,) = warnings(config_with(denoiser=gang, stages="together"))
    assert "GPUs, and text_encoder on CPU" in warning
    assert not list(warnings(config_with(denoiser={"num_ranks": 1})))


def test_serve_and_doctor_print_the_warnings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(config: ServeConfig, on_open: object) -> NoReturn:
        raise ValueError("the start")

    monkeypatch.setattr(progress, "started", stop)
    monkeypatch.delenv("TROUPE_API_KEYS_FILE", raising=False)
    monkeypatch.delenv("TROUPE_API_KEYS", raising=False)
    file = config_file(config_with(denoiser={"num_ranks": 1, "gpus_per_rank": 1}), tmp_path)
    first, second, *others = troupe("serve", file, "--host", "0.0.0.0", "--metrics-port", "0").stderr.splitlines()
    assert first.startswith("troupe: warning: anybody who reaches 0.0.0.0 can use this server")
    assert second.startswith(
        "troupe: warning: the model flux-shapes: its ranks have GPUs, and text_encoder and decoder"
    )
    assert others == ["troupe: the start"]
    report = troupe("doctor", "--config", file, "--json").stdout
    assert "warning: the model flux-shapes: its ranks have GPUs, and text_encoder and decoder on CPU cores" in report


def config_with(**model: object) -> ServeConfig:
    document = load_config("laptop").model_dump(mode="json")
    document["applications"][0]["args"]["models"] = [{"name": "flux-shapes", **model}]
    return parse_config(document)


def test_warns_of_an_open_address_without_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TROUPE_API_KEYS_FILE", raising=False)
    monkeypatch.delenv("TROUPE_API_KEYS", raising=False)
    laptop = load_config("laptop")
    (warning,) = warnings(laptop.with_http(host="0.0.0.0"))
    assert "0.0.0.0" in warning
    assert not list(warnings(laptop))
    monkeypatch.setenv("TROUPE_API_KEYS", "secret")
    assert not list(warnings(laptop.with_http(host="0.0.0.0")))
