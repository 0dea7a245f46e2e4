"""Quantised files of every family's transformer: eight-bit values with scales in folders and files, and GGUF."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from diffusers.quantizers.gguf.utils import GGUFParameter, dequantize_gguf_tensor
from safetensors.torch import load_file, save_file

from pipelines.checkpoint import Checkpoint
from tests.pipelines.blocks.test_offloaded_blocks import CASES
from tests.pipelines.loading.test_gguf import BLOCK, finish
from tests.pipelines.support.checkpoints.damage import Tensors, by_hand, changed, scaled

ENDING = ".weight_scale"
Q8_0 = gguf.GGMLQuantizationType.Q8_0


def scaled_folder(base: Path, folder: Path) -> tuple[str, Tensors]:
    """Return the name of a copy of ``base`` whose transformer is scaled, and the values that it stands for."""
    part = part_of(base)
    changed(base, part, folder, lambda x: scaled(x, ENDING))
    return str(folder), by_hand(scaled(tensors_of(base), ENDING), ENDING)


def scaled_file(base: Path, folder: Path) -> tuple[str, Tensors]:
    folder.mkdir()
    written = scaled(tensors_of(base), ENDING)
    save_file(written, folder / "one.safetensors")
    return f"{folder / 'one.safetensors'}@{base}", by_hand(written, ENDING)


def gguf_file(base: Path, folder: Path) -> tuple[str, Tensors]:
    folder.mkdir()
    return f"{folder / 'one.gguf'}@{base}", write_gguf(base, folder / "one.gguf")


def gguf_folder(base: Path, folder: Path) -> tuple[str, Tensors]:
    """Return the name of a copy of ``base`` with a GGUF transformer, and its values."""
    shutil.copytree(base, folder)
    (own,) = (folder / part_of(base)).glob("*.safetensors")
    own.unlink()
    return str(folder), write_gguf(base, own.with_name("one.gguf"))


def write_gguf(base: Path, file: Path) -> Tensors:
    """Write the file and return its values as diffusers reads them."""
    writer, stored = gguf.GGUFWriter(file, "any"), Tensors()
    for name, weight in tensors_of(base).items():
        values = np.ascontiguousarray(weight.float().numpy())
        stored[name] = weight.float()
        if name.endswith(".weight") and values.ndim == 2 and values.shape[1] % BLOCK == 0:
            blocks = gguf.quants.quantize(values, Q8_0)
            writer.add_tensor(name, blocks, raw_dtype=Q8_0)
            stored[name] = dequantize_gguf_tensor(GGUFParameter(torch.from_numpy(blocks), quant_type=Q8_0)).float()
        else:
            writer.add_tensor(name, values)
    finish(writer)
    return stored


def part_of(base: Path) -> str:
    return next(name for name in ("transformer", "unet") if (base / name).is_dir())


def tensors_of(base: Path) -> Tensors:
    (file,) = (base / part_of(base)).glob("*.safetensors")
    return load_file(file)


IN_FOLDERS = {"scaled folder": scaled_folder, "gguf folder": gguf_folder}
IN_FILES = {"scaled file": scaled_file, "gguf file": gguf_file}
FORMS: dict[str, Callable[[Path, Path], tuple[str, Tensors]]] = {**IN_FOLDERS, **IN_FILES}
OF_TWO = ("wan 2.2",)
"""Models with two transformers, each in its folder."""
OWN_NAMES_ALONE = ("hunyuan video 1.5", "helios", "helios pyramid", "cosmos 3", "cosmos 3 with sound", "ideogram 4")
"""Families whose class diffusers reads in its own names alone."""
READABLE = [
    (name, form) for form in FORMS for name in CASES if form in IN_FOLDERS or name not in (*OF_TWO, *OWN_NAMES_ALONE)
]


@pytest.mark.parametrize(("name", "form"), READABLE)
def test_weights_are_what_they_stand_for(name: str, form: str, folders: Callable[[Any], Path], tmp_path: Path) -> None:
    base = folders(CASES[name].make)
    source, expected = FORMS[form](base, tmp_path / "quantised")
    modules = Checkpoint.open(source, "cpu", torch.float32).denoiser().modules
    read, written = dict(modules[part_of(base)].state_dict()), tensors_of(base)
    assert read.keys() >= expected.keys()
    assert all(torch.equal(read[key], x.to(read[key].dtype)) for key, x in expected.items())
    assert sum(not torch.equal(expected[key], x) for key, x in written.items()) > 1, "some are quantised"


@pytest.mark.parametrize("name", OWN_NAMES_ALONE)
def test_other_names_of_these_classes_are_told(name: str, folders: Callable[[Any], Path], tmp_path: Path) -> None:
    folder = shutil.copytree(folders(CASES[name].make), tmp_path / "model")
    (file,) = (folder / part_of(folder)).glob("*.safetensors")
    save_file({f"theirs.{key}": x for key, x in load_file(file).items()}, file.with_name("theirs.safetensors"))
    file.unlink()
    with pytest.raises(ValueError, match=r"nothing reads a \w+ in other names than diffusers' own"):
        Checkpoint(folder, "cpu", torch.float32).denoiser()
