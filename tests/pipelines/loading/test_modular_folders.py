"""Folders in the modular layout have parts in themselves, in other folders and on the hub."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pipelines.checkpoint import Checkpoint
from pipelines.directory import MODULAR_INDEX, open_modular, part_class, part_folder, repositories
from pipelines.loading import CONFIGURATION_FILES, HUB_FILES, resolve_path
from pipelines.run import load_pipeline
from tests.pipelines.support.checkpoints import tiny_models
from tests.pipelines.support.references.own_call import own_latents
from tests.pipelines.support.sample_requests import picture

REQUEST = picture(
    prompt="a red circle", width=32, height=32, num_inference_steps=2, true_cfg_scale=2.0, negative_prompt="blue"
)


@pytest.fixture(scope="module")
def classic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.qwen_image(tmp_path_factory.mktemp("classic"))


@pytest.fixture(scope="module")
def saved(classic: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of ``ModularPipeline.save_pretrained``: its index has its absolute path."""
    pipeline = open_modular(classic)
    pipeline.load_components(dtype=torch.float32)
    folder = tmp_path_factory.mktemp("modular") / "saved"
    pipeline.save_pretrained(str(folder), overwrite_modular_index=True)
    return folder


@pytest.fixture
def moved(saved: Path, tmp_path: Path) -> Path:
    """Return the same folder, moved: the path in its index no longer exists."""
    folder = Path(shutil.copytree(saved, tmp_path / "moved"))
    text = (folder / MODULAR_INDEX).read_text().replace(str(saved), "/not/there")
    (folder / MODULAR_INDEX).write_text(text)
    return folder


@pytest.fixture
def pointing(saved: Path, tmp_path: Path) -> Path:
    """Return a folder with an index alone, whose parts are elsewhere."""
    folder = tmp_path / "pointing"
    folder.mkdir()
    shutil.copy(saved / MODULAR_INDEX, folder)
    return folder


def denoised(folder: Path) -> torch.Tensor:
    latents: torch.Tensor = load_pipeline(Checkpoint.open(str(folder))).denoise(REQUEST)["latents"]
    return latents


@pytest.mark.parametrize("kind", ["saved", "moved", "pointing"])
def test_it_gives_the_latents_of_the_classic_folder(kind: str, classic: Path, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue(kind)
    assert not (folder / "model_index.json").exists()
    torch.testing.assert_close(denoised(folder), own_latents(classic, REQUEST), rtol=1e-5, atol=1e-5)


def test_ranks_read_their_share_of_weights_from_another_folder(pointing: Path, saved: Path) -> None:
    model = Checkpoint(pointing).denoiser(sliced=True)
    assert model.weights is not None
    assert part_folder(pointing, "transformer") == saved / "transformer"


def test_defaults_and_class_come_from_the_index(pointing: Path, classic: Path) -> None:
    assert part_class(pointing, "transformer") == "QwenImageTransformer2DModel"
    assert Checkpoint(pointing).defaults == Checkpoint(classic).defaults


@pytest.fixture
def hub(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Return a function that fills a hub cache as `hf download` does."""
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))

    def put(name: str) -> Path:
        repository, commit = tmp_path / f"models--{name.replace('/', '--')}", "0123456789" * 4
        shutil.copytree(saved, repository / "snapshots" / commit)
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text(commit)
        return repository / "snapshots" / commit

    return put


def test_parts_may_be_in_a_repository(hub: Callable[[str], Path], pointing: Path, saved: Path, classic: Path) -> None:
    index = pointing / MODULAR_INDEX
    index.write_text(index.read_text().replace(str(saved), "someone/parts"))
    with pytest.raises(ValueError, match="hf download someone/parts"):
        resolve_path(str(pointing))
    parts = hub("someone/parts")
    assert part_folder(resolve_path(str(pointing)), "transformer") == parts / "transformer"
    assert Checkpoint(pointing).defaults == Checkpoint(classic).defaults
    assert ("someone/parts", "transformer") in list(repositories(pointing))


def test_a_part_may_be_a_repository_of_its_own(hub: Callable[[str], Path], pointing: Path) -> None:
    index = pointing / MODULAR_INDEX
    entries = json.loads(index.read_text())
    entries["vae"][2] |= {"pretrained_model_name_or_path": "someone/vae", "subfolder": None}
    index.write_text(json.dumps(entries))
    with pytest.raises(ValueError, match="hf download someone/vae"):
        resolve_path(str(pointing))
    vae = hub("someone/vae")
    assert part_folder(resolve_path(str(pointing)), "vae") == vae


def test_what_the_hub_is_asked_for_holds_the_index() -> None:
    from huggingface_hub.utils import filter_repo_objects  # type: ignore[attr-defined]

    needed = [MODULAR_INDEX, "transformer/config.json", "text_encoder/chat_template.jinja"]
    for patterns in (HUB_FILES, CONFIGURATION_FILES):
        assert list(filter_repo_objects(needed, allow_patterns=patterns)) == needed


def test_a_class_may_stand_in_the_place_alone(pointing: Path) -> None:
    """The index has the class there for parts that were not loaded when it was written."""
    index = pointing / MODULAR_INDEX
    entries = json.loads(index.read_text())
    entries["transformer"][:2] = [None, None]
    index.write_text(json.dumps(entries))
    assert part_class(pointing, "transformer") == "QwenImageTransformer2DModel"
