from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pipelines.checkpoint import Checkpoint
from pipelines.loading import (
    CONFIGURATION_FILES,
    HUB_FILES,
    SHIPPED,
    resolve_configuration,
    resolve_dtype,
    resolve_path,
    shipped_checkpoints,
)
from pipelines.own_defaults import with_own_defaults
from tests.pipelines.support.checkpoints import tiny
from tests.pipelines.support.references.frames import painted
from tests.pipelines.support.sample_requests import clip, picture

CPU = torch.device("cpu")


def test_a_folder_is_itself(tmp_path: Path) -> None:
    assert resolve_path(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("name", shipped_checkpoints())
def test_shipped_checkpoints_go_by_name(name: str) -> None:
    assert resolve_path(name) == SHIPPED / name


def test_an_unknown_name_lists_what_is_possible() -> None:
    with pytest.raises(ValueError, match="no model 'nonsense': give a diffusers folder, a hub id"):
        resolve_path("nonsense")


def test_a_hub_id_without_a_network_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub.constants as hub

    monkeypatch.setattr(hub, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(hub, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ValueError, match="unset HF_HUB_OFFLINE, or run `hf download someone/something`"):
        resolve_path("someone/something")


def test_a_hub_id_in_the_cache_needs_no_network(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_flux: Path
) -> None:
    """The cache is as `hf download` leaves it: the folder of a commit, and a reference to it."""
    import huggingface_hub.constants as hub

    repository, commit = tmp_path / "models--someone--something", "0123456789" * 4
    shutil.copytree(tiny_flux, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    monkeypatch.setattr(hub, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(hub, "HF_HUB_CACHE", str(tmp_path))
    path = resolve_path("someone/something")
    assert path == repository / "snapshots" / commit
    with pytest.raises(ValueError, match=rf"folder of all revisions: give one of them, .*{commit}"):
        resolve_path(str(repository))
    (path / "snapshots" / "step-1000").mkdir(parents=True)  # a trainer's, in a model's own folder
    assert resolve_path(str(path)) == path
    assert painted(path, picture()).shape == (1, 32, 48, 3)


def test_what_is_fetched_from_the_hub_is_the_diffusers_layout_alone() -> None:
    """Files of black-forest-labs/FLUX.1-dev and Wan-AI/Wan2.1-T2V-1.3B-Diffusers; the top holds the weights again."""
    from huggingface_hub.utils import filter_repo_objects  # type: ignore[attr-defined]

    needed = [
        "model_index.json",
        "scheduler/scheduler_config.json",
        "text_encoder_2/model-00001-of-00002.safetensors",
        "text_encoder_2/model.safetensors.index.json",
        "tokenizer/merges.txt",
        "tokenizer/special_tokens_map.json",
        "tokenizer/spiece.model",
        "transformer/diffusion_pytorch_model-00001-of-00003.safetensors",
        "transformer/diffusion_pytorch_model.safetensors.index.json",
        "vae/config.json",
    ]
    spare = ["flux1-dev.safetensors", "ae.safetensors", "dev_grid.jpg", "README.md", "assets/logo.png"]
    assert list(filter_repo_objects(needed + spare, allow_patterns=HUB_FILES)) == needed


def test_who_reads_configurations_alone_fetches_no_weights(monkeypatch: pytest.MonkeyPatch, tiny_flux: Path) -> None:
    asked: list[list[str]] = []

    def fetch(hub_id: str, *, allow_patterns: list[str]) -> str:
        asked.append(allow_patterns)
        return str(tiny_flux)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    for path in (resolve_path("some/model", weights=False), resolve_configuration("some/model")):
        assert Checkpoint(path).defaults.kind == "image"
    assert asked == [CONFIGURATION_FILES] * 2
    assert set(HUB_FILES) - set(CONFIGURATION_FILES) == {"*/*.safetensors"}


def test_dtypes() -> None:
    assert resolve_dtype("auto", CPU) == torch.float32
    assert resolve_dtype("auto", torch.device("cuda")) == torch.bfloat16
    assert resolve_dtype("float16", CPU) == torch.float16
    with pytest.raises(ValueError, match="unknown dtype 'int4'; known: auto, float32"):
        resolve_dtype("int4", CPU)


def test_other_pipelines_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no model_index\.json"):
        Checkpoint(tmp_path)
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "OtherPipeline"}))
    with pytest.raises(ValueError, match="holds a OtherPipeline, which has no transformer"):
        Checkpoint(tmp_path)
    other = {"_class_name": "OtherPipeline", "transformer": ["diffusers", "OtherTransformer"]}
    (tmp_path / "model_index.json").write_text(json.dumps(other))
    with pytest.raises(ValueError, match="diffusers has no class OtherTransformer, and no family here knows it"):
        Checkpoint(tmp_path)


def test_defaults_follow_the_model(tiny_flux: Path, tiny_schnell: Path, tiny_wan: Path, tmp_path: Path) -> None:
    dev, schnell = (Checkpoint(path).defaults for path in (tiny_flux, tiny_schnell))
    assert (dev.num_inference_steps, dev.guidance_scale, dev.size_multiple) == (28, 3.5, 8)
    assert (schnell.num_inference_steps, schnell.guidance_scale) == (4, 0.0)
    wan21 = Checkpoint(tiny_wan).defaults
    assert (wan21.width, wan21.height, wan21.num_frames, wan21.fps, wan21.true_cfg_scale) == (832, 480, 81, 16, 5.0)
    assert (wan21.size_multiple, wan21.frame_multiple) == (16, 4)
    experts = tiny.wan(tmp_path / "experts", boundary_ratio=0.875)
    assert Checkpoint(experts).defaults.num_inference_steps == 40
    per_token = tiny.wan(tmp_path / "per_token", expand_timesteps=True)
    assert Checkpoint(per_token).defaults.fps == 24
    for name, pictures in {"Wan2.2-TI2V-5B": (0, 1), "Wan2.1-T2V-14B": (0, 0), "Wan2.2-I2V-A14B": (1, 1)}.items():
        published = Checkpoint.of_configuration(name, "meta").defaults
        assert (published.min_pictures, published.max_pictures) == pictures, name


def test_a_folder_may_bring_its_own_defaults(tiny_flux: Path, tmp_path: Path) -> None:
    known = Checkpoint(tiny_flux).defaults
    (tmp_path / "troupe.json").write_text(json.dumps({"width": 128, "num_inference_steps": 20}))
    own = with_own_defaults(tmp_path, known)
    assert (own.width, own.num_inference_steps, own.height) == (128, 20, known.height)
    (tmp_path / "troupe.json").write_text(json.dumps({"widht": 128}))
    with pytest.raises(ValueError, match="unknown keys widht; known: width, height"):
        with_own_defaults(tmp_path, known)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (clip(), "makes images, not videos"),
        (picture(width=50), "size is 50x32: width and height must be positive multiples of 8, such as 48x32"),
        (picture(height=0), "size is 48x0"),
        (picture(width=4096, height=4096), "at most 4194304 pixels"),
        (picture(num_frames=5), "at most 1"),
        (picture(num_inference_steps=0), "num_inference_steps is 0; it must be from 1 to 100"),
    ],
)
def test_requests_outside_the_limits_are_refused(tiny_flux: Path, request_: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Checkpoint(tiny_flux).defaults.check(request_)  # type: ignore[arg-type]


def test_from_prompt_to_frames(tiny_flux: Path, tiny_wan: Path) -> None:
    assert painted(tiny_flux, picture()).shape == (1, 32, 48, 3)
    assert painted(tiny_wan, clip()).shape == (5, 32, 48, 3)
    with pytest.raises(ValueError, match="multiples of"):
        painted(tiny_flux, picture(width=47))


def modules_after(script: str, path: Path) -> set[str]:
    done = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize("length", [10, 100])
def test_a_prompt_that_is_cut_is_logged(tiny_wan: Path, caplog: pytest.LogCaptureFixture, length: int) -> None:
    encoder = Checkpoint(tiny_wan).text_encoder()
    encoder.encode(clip(prompt="x" * length))
    expected = ["the prompt has 101 tokens; the model sees the first 24"] if length > 24 else []
    assert [record.getMessage() for record in caplog.records if record.name == "pipelines.blocks.encoder"] == expected


def test_defaults_need_neither_torch_nor_diffusers(tiny_flux: Path) -> None:
    """The ingress reads defaults, and should start fast and stay small."""
    script = "import sys; from pathlib import Path; from pipelines.checkpoint import Checkpoint; "
    script += "Checkpoint(Path(sys.argv[1])).defaults; print(*sys.modules)"
    assert not modules_after(script, tiny_flux) & {"torch", "diffusers", "transformers", "PIL"}
