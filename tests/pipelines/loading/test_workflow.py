"""A workflow that needs another transformer of a folder is opened as its own model."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from pipelines.checkpoint import Checkpoint
from pipelines.directory import changed_at_s, linked_folder, part_class, read_index
from pipelines.loading import ModelSource, resolve_path
from pipelines.preconditions import weight_problems
from pipelines.workflow import FOLDERS
from tests.pipelines.support.checkpoints.tiny_minimax import minimax_h3, minimax_h3_references

WORKFLOW = "ref2va"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with both transformers, the second without weights."""
    monkeypatch.setattr("huggingface_hub.utils._cache_assets.HF_ASSETS_CACHE", str(tmp_path / "cache"))
    folder = minimax_h3(tmp_path / "model")
    (folder / "transformer_ref").mkdir()
    shutil.copy(folder / "transformer" / "config.json", folder / "transformer_ref")
    return folder


def test_names_are_split_as_they_are_made() -> None:
    network = f"owner/model+workflow@{WORKFLOW}+controlnet@owner/network"
    parts = ModelSource(base="owner/model", workflow=WORKFLOW, network="owner/network")
    assert (ModelSource.parse(network), str(parts)) == (parts, network)
    for name in ("owner/model", f"owner/model+workflow@{WORKFLOW}", "owner/model+controlnet@owner/network", "a@b"):
        assert str(ModelSource.parse(name)) == name
    assert ModelSource.parse("a@b") == ModelSource(base="a@b")
    with pytest.raises(ValueError, match=r"base is .owner/model., which needs"):
        str(ModelSource(base="owner/model", file="owner/other"))


def test_a_workflow_has_its_own_transformer_and_the_other_parts(folder: Path) -> None:
    plain, own = Checkpoint.open(str(folder)), Checkpoint.open(str(ModelSource(base=str(folder), workflow=WORKFLOW)))
    assert own.path == Checkpoint.open(str(ModelSource(base=str(folder), workflow=WORKFLOW))).path
    assert changed_at_s(own.path) == changed_at_s(folder)
    assert [part_class(own.path, name) is None for name in ("transformer", "transformer_ref")] == [True, False]
    assert (own.path / "vae").resolve() == folder / "vae"
    assert plain.defaults.capabilities == ("text-to-video", "image-to-video")
    assert own.defaults.capabilities == ("image-to-video", "video-to-video")
    assert (own.defaults.max_pictures, own.defaults.needs_source) == (9, True)


def test_two_processes_of_one_number_make_it_at_once(folder: Path) -> None:
    """Processes in containers that share a cache may have the same id."""
    source, replaced = str(ModelSource(base=str(folder), workflow=WORKFLOW)), Path.replace
    inner: list[Path] = []

    def replace(written: Path, target: Path) -> Path:
        if not inner:
            inner.append(target)
            inner.append(resolve_path(source))
        return replaced(written, target)

    with patch.object(Path, "replace", replace):
        path = resolve_path(source)
    assert inner == [path / "modular_model_index.json", path]
    assert part_class(path, "transformer_ref") is not None
    assert sorted(file.name for file in path.iterdir() if "index" in file.name) == ["modular_model_index.json"]


def test_a_cache_that_cannot_be_written_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system", "/cache/assets")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    with pytest.raises(ValueError, match=r"Read-only file system: '/cache/assets'.*set HF_ASSETS_CACHE to a folder"):
        resolve_path(str(ModelSource(base=str(folder), workflow=WORKFLOW)))


@pytest.mark.parametrize("name", ["modular_model_index.json", ""], ids=["index", "folder"])
def test_a_model_that_went_away_is_named(folder: Path, name: str) -> None:
    """The cache is not at fault, so its setting is not named."""
    entries = read_index(folder)
    (folder / name).rename(folder.parent / "elsewhere")
    with pytest.raises(ValueError, match=rf"folder {folder} cannot be read \(.*No such file") as error:
        linked_folder(folder, FOLDERS, "key", entries)
    assert "HF_ASSETS_CACHE" not in str(error.value)


def test_weights_are_needed_of_its_own_transformer_alone(folder: Path, tmp_path: Path) -> None:
    assert list(weight_problems(Checkpoint.open(str(folder)))) == []
    (problem,) = weight_problems(Checkpoint.open(str(ModelSource(base=str(folder), workflow=WORKFLOW))))
    assert problem.endswith("transformer_ref has no weights: download the whole model, not only its configuration")
    references = Checkpoint.open(str(minimax_h3_references(tmp_path / "references")))
    assert list(weight_problems(references)) == []


def test_a_folder_without_the_transformer_is_refused(folder: Path) -> None:
    index = folder / "modular_model_index.json"
    entries = json.loads(index.read_text())
    del entries["transformer_ref"]
    index.write_text(json.dumps(entries))
    with pytest.raises(ValueError, match="has no transformer for the workflow ref2va: download the whole model"):
        Checkpoint.open(str(ModelSource(base=str(folder), workflow=WORKFLOW)))


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("flux-shapes+workflow@ref2va", "workflow is 'ref2va', and flux has none: leave workflow out"),
        ("MiniMax-H3+workflow@fl2va", "workflow is 'fl2va'; minimax_h3 has ref2va, and all else without one"),
    ],
)
def test_unknown_workflows_are_refused(source: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Checkpoint.of_configuration(source)


@pytest.mark.parametrize(
    ("workflow", "left_out"), [(WORKFLOW, "transformer/*"), ("", "transformer_ref/*.safetensors")], ids=["own", "plain"]
)
def test_the_hub_sends_no_weights_that_it_leaves_out(folder: Path, workflow: str, left_out: str) -> None:
    asked: list[dict[str, Any]] = []

    def download(_hub_id: str, **patterns: Any) -> str:
        asked.append(patterns)
        return str(folder)

    with patch("huggingface_hub.snapshot_download", download):
        path = resolve_path(str(ModelSource(base="owner/model", workflow=workflow)))
    assert (part_class(path, "transformer") is None) is bool(workflow)
    first, second = asked
    assert not any(pattern.endswith(".safetensors") for pattern in first["allow_patterns"])
    assert second["ignore_patterns"] == [left_out]
