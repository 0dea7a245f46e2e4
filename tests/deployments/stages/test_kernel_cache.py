"""Nodes share compiled kernels through a store."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal
from unittest.mock import Mock

import pytest
import torch

from deployments.clips.objects import Bucket
from deployments.model_config import ModelConfig
from deployments.stages import kernel_cache
from deployments.stages.kernel_cache import (
    FolderStore,
    shared_kernels,
    stage_kernels,
    strategies_folder,
)
from engines.core import torch_private
from pipelines.lora.source import LoraLimits, LoraSource
from pipelines.recipes import Recipe
from pipelines.size import Size
from tests.engines.fast.support.triton_layout import install_layout

MODEL = ModelConfig(name="pictures", path="flux-shapes")
NODE = """
import json, torch
from torch._dynamo.utils import counters
from deployments.model_config import ModelConfig
from deployments.stages.kernel_cache import shared_kernels

with shared_kernels(ModelConfig(name="pictures", path="flux-shapes"), "decoder", "cpu"):
    result = torch.compile(lambda x: x.sin() + 1)(torch.ones(3)).tolist()
found = {name: counters["inductor"][name] for name in ("fxgraph_cache_hit", "fxgraph_cache_miss")}
print(json.dumps({"result": result, **found}))
"""


class Bundles:
    """Stands for PyTorch's bundles: nothing is compiled."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: tuple[bytes, Any] | None = (b"kernels", None)
        self.loaded: list[bytes] = []
        monkeypatch.setattr(torch.compiler, "save_cache_artifacts", lambda: self.made)
        monkeypatch.setattr(torch_private, "load_compiled", self.load)

    def load(self, bundle: bytes) -> None:
        if bundle != b"kernels":
            raise ValueError("no bundle")
        self.loaded.append(bundle)


@pytest.fixture
def bundles(monkeypatch: pytest.MonkeyPatch) -> Bundles:
    return Bundles(monkeypatch)


@pytest.fixture(params=["folder", "bucket"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    place = str(tmp_path) if request.param == "folder" else f"memory://{tmp_path.name}"
    monkeypatch.setenv("TROUPE_KERNEL_CACHE", place)
    return place


def test_the_first_of_a_part_stores_what_later_ones_load(place: str, bundles: Bundles) -> None:
    for part in ("decoder", "decoder", "text_encoder"):
        with shared_kernels(MODEL, part, "cpu"):
            pass
    assert bundles.loaded == [b"kernels"]


@pytest.mark.parametrize("part", ["text_encoder", "decoder"])
def test_encoders_and_decoders_that_compile_nothing_do_not_look(
    part: Literal["text_encoder", "decoder"], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU they are captured, and without ``compile`` they run eagerly."""
    monkeypatch.setattr(kernel_cache, "has_triton", lambda: part == "text_encoder")
    monkeypatch.setattr(kernel_cache, "shared_store", Mock(side_effect=LookupError))
    stage = getattr(MODEL, part)
    plain, compiled = (MODEL.model_copy(update={part: replace(stage, compile=compile)}) for compile in (False, True))
    for model, device in ((plain, "cpu"), (plain, "cuda:0"), (compiled, "cuda:0")):
        with stage_kernels(model, part, device):
            pass
    with pytest.raises(LookupError), stage_kernels(compiled, part, "cpu"):
        pass
    monkeypatch.setattr(kernel_cache, "has_triton", lambda: True)
    if part == "decoder":  # its norms are kernels in Triton
        with pytest.raises(LookupError), stage_kernels(compiled, part, "cuda:0"):
            pass


def test_other_settings_have_kernels_of_their_own(place: str, bundles: Bundles) -> None:
    """Quantised steps find no kernels of other settings, and the second node of each finds its own."""
    quantised = MODEL.model_copy(update={"denoiser": replace(MODEL.denoiser, precision="int8")})
    larger = MODEL.model_copy(update={"denoiser": replace(MODEL.denoiser, warm_sizes=(Size(width=64, height=64),))})
    together = MODEL.model_copy(update={"stages": "together"})
    adapted = MODEL.model_copy(update={"loras": (LoraSource(path="adapter", name="style"),)})
    open_to_all = MODEL.model_copy(update={"runtime_loras": LoraLimits()})
    in_float8 = MODEL.model_copy(update={"recipes": {"quick": Recipe(attention="fp8")}})
    twice = MODEL.model_copy(update={"recipes": {"fine": Recipe(second_stage_sigmas=(0.5,))}})
    sliced = MODEL.model_copy(
        update={"denoiser": replace(MODEL.denoiser, num_ranks=2, load="sliced", strategy="tensor")}
    )
    whole = MODEL.model_copy(update={"denoiser": replace(sliced.denoiser, load="whole")})
    models = (MODEL, quantised, larger, together, sliced, whole, adapted, open_to_all, in_float8, twice)
    for number in (0, len(models)):
        for model in models:
            with shared_kernels(model, "decoder", "cpu"):
                pass
        assert len(bundles.loaded) == number


def test_a_process_that_compiles_nothing_stores_nothing(place: str, bundles: Bundles) -> None:
    bundles.made = None
    for _ in range(2):
        with shared_kernels(MODEL, "decoder", "cpu"):
            pass
    assert not bundles.loaded


@pytest.mark.parametrize("made", [None, (b"kernels", None)])
def test_entries_of_triton_go_to_new_nodes(
    place: str, bundles: Bundles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: tuple[bytes, Any] | None
) -> None:
    """PyTorch need not have compiled anything. The second node finds the first one's entries in its own cache."""
    layout = install_layout(monkeypatch)
    monkeypatch.setattr(kernel_cache, "device_name", lambda device: "GPU")
    bundles.made, key = made, "ab" * 32
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "first"))
    with shared_kernels(MODEL, "decoder", "cuda:0"):
        manager = layout.get_cache_manager(key)
        manager.put_group("kernel.json", {"kernel.cubin": manager.put(b"code", "kernel.cubin")})
    for node in ("second", "third"):
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / node))
        with shared_kernels(MODEL, "decoder", "cuda:0"):
            group = layout.get_cache_manager(key).get_group("kernel.json")
        assert Path(group["kernel.cubin"]).read_bytes() == b"code"
        assert Path(group["kernel.cubin"]).is_relative_to(tmp_path / node)
    assert bundles.loaded == ([b"kernels"] * 2 if made else [])
    with shared_kernels(MODEL, "decoder", "cpu"):  # Triton is not used here
        pass
    assert layout.get_cache_manager("cd" * 32).get_group("kernel.json") is None


def test_a_bundle_is_extended_by_entries_that_it_lacks(
    place: str, bundles: Bundles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch's kernels stay as first stored, and a bundle that lacks nothing is not written again."""
    layout, one, other = install_layout(monkeypatch), "ab" * 32, "cd" * 32
    monkeypatch.setattr(kernel_cache, "device_name", lambda device: "GPU")
    for node, looked_up, found in (
        ("first", [one], []),
        ("second", [other], []),
        ("third", [one, other], [one, other]),
    ):
        if node == "third":
            writes = [Mock(), Mock()]
            monkeypatch.setattr(FolderStore, "write", writes[0])
            monkeypatch.setattr(Bucket, "write", writes[1])
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / node))
        with shared_kernels(MODEL, "decoder", "cuda:0"):
            managers = {key: layout.get_cache_manager(key) for key in looked_up}
            assert [key for key, manager in managers.items() if manager.get_file("kernel.cubin")] == found
            for key in set(looked_up) - set(found):
                managers[key].put(b"code", "kernel.cubin")
        bundles.made = (b"choices of another node", None)
    assert bundles.loaded == [b"kernels"] * 2
    assert not any(write.called for write in writes)


def test_a_bundle_that_cannot_be_read_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bundles: Bundles
) -> None:
    """Otherwise all later nodes would compile again."""
    monkeypatch.setenv("TROUPE_KERNEL_CACHE", str(tmp_path))
    for number in range(3):
        with shared_kernels(MODEL, "decoder", "cpu"):
            pass
        if number == 0:
            (file,) = (tmp_path / "kernels").iterdir()
            file.write_bytes(file.read_bytes()[:-1])
    assert bundles.loaded == [b"kernels"]


def test_a_store_that_fails_for_a_while_keeps_what_it_has(
    place: str, bundles: Bundles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that could not read others' choices does not replace them by its own."""
    with shared_kernels(MODEL, "decoder", "cpu"):
        pass
    bundles.made = (b"choices of another node", None)
    with monkeypatch.context() as failing:
        for store in (FolderStore, Bucket):
            failing.setattr(store, "read", Mock(side_effect=TimeoutError("later")))
        with shared_kernels(MODEL, "decoder", "cpu"):
            failing.undo()  # it works again when the node has compiled
    with shared_kernels(MODEL, "decoder", "cpu"):
        pass
    assert bundles.loaded == [b"kernels"]


def test_the_first_of_concurrent_processes_stores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bundles: Bundles, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", kernel_cache.__name__)
    monkeypatch.setenv("TROUPE_KERNEL_CACHE", str(tmp_path))
    with shared_kernels(MODEL, "decoder", "cpu"):
        with shared_kernels(MODEL, "decoder", "cpu"):
            pass
        bundles.made = (b"choices of another node", None)
    assert caplog.messages == ["compiled kernels are stored"]
    with shared_kernels(MODEL, "decoder", "cpu"):
        pass
    assert bundles.loaded == [b"kernels"]


def test_another_triton_or_a_file_that_is_no_bundle_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bundles: Bundles, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TROUPE_KERNEL_CACHE", str(tmp_path))
    monkeypatch.setattr(kernel_cache, "device_name", lambda device: "GPU")
    monkeypatch.setattr(kernel_cache, "has_triton", lambda: True)
    monkeypatch.setattr(kernel_cache, "recorded_entries", Mock(side_effect=ImportError("no knobs")))
    with shared_kernels(MODEL, "decoder", "cuda:0"):
        pass
    assert "kernels of Triton are not shared with other nodes: no knobs" in caplog.messages
    (file,) = (tmp_path / "kernels").iterdir()
    file.write_bytes(b"of an older version")
    with shared_kernels(MODEL, "decoder", "cuda:0"):
        pass
    assert "compiled kernels of other nodes cannot be read: File is not a zip file" in caplog.messages


def test_a_store_that_fails_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bundles: Bundles, caplog: pytest.LogCaptureFixture
) -> None:
    """The stores lack a package, have a file in the folder's place, or hold an unreadable bundle."""
    (tmp_path / "file").touch()
    for place in ("unknown://bucket", str(tmp_path / "file")):
        monkeypatch.setenv("TROUPE_KERNEL_CACHE", place)
        with shared_kernels(MODEL, "decoder", "cpu"):
            pass
    assert [record.levelname for record in caplog.records].count("WARNING") == 2
    monkeypatch.setenv("TROUPE_KERNEL_CACHE", str(tmp_path / "folder"))
    bundles.made = (b"broken", None)
    for _ in range(2):
        with shared_kernels(MODEL, "decoder", "cpu"):
            pass
    assert "compiled kernels of other nodes cannot be read: no bundle" in caplog.messages[-2:]


def test_decisions_on_strategies_are_shared_in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TROUPE_DATA_DIR", str(tmp_path / "data"))
    assert strategies_folder() == tmp_path / "data" / "strategies"
    monkeypatch.setenv("TROUPE_KERNEL_CACHE", "s3://bucket")
    assert strategies_folder() == tmp_path / "data" / "strategies"
    monkeypatch.setenv("TROUPE_KERNEL_CACHE", str(tmp_path / "shared"))
    assert strategies_folder() == tmp_path / "shared" / "strategies"


@pytest.mark.slow
def test_a_new_node_compiles_nothing(tmp_path: Path) -> None:
    found = []
    for node in ("first", "second"):
        places = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / node), "TROUPE_KERNEL_CACHE": str(tmp_path / "shared")}
        command = [sys.executable, "-c", NODE]
        done = subprocess.run(command, env={**os.environ, **places}, capture_output=True, text=True, check=True)
        found.append(json.loads(done.stdout.splitlines()[-1]))
    assert [one["fxgraph_cache_miss"] for one in found] == [1, 0]
    assert found[1]["fxgraph_cache_hit"] == 1
    assert found[0]["result"] == found[1]["result"]
