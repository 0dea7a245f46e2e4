"""Problems that prevent a model from loading, found in configurations and file headers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, cast

from safetensors import SafetensorError, safe_open

from pipelines.checkpoint import PLAIN, Checkpoint
from pipelines.control_network import UPSAMPLER_FOLDER
from pipelines.directory import (
    DENOISERS,
    GGUF,
    SAFETENSORS,
    SHOWN,
    lone_file,
    part_class,
    part_folder,
    quantiser_of,
    read_config,
    read_index,
)
from pipelines.loading import local_path, resolve_file
from pipelines.lora.source import ADAPTER_FILES, LoraSource
from pipelines.single_file import check_metadata

if TYPE_CHECKING:
    from pipelines.models.generic.whole import WholeSpec

INDEX = f"{SHOWN}.safetensors.index.json"
PLAIN_BLOCK = "UpDecoderBlock2D"
"""Blocks of a ``PLAIN`` auto-encoder with group norms, which supports all options."""
OTHER_FORMATS, UNREAD_FORMATS = ("*.bin", f"*{GGUF}"), ("*.pt", "*.pth", "*.ckpt", "*.sft", "*.msgpack")
GGUF_MAGIC = b"GGUF"


def weight_problems(checkpoint: Checkpoint) -> Iterator[str]:
    """Yield the problems of the weights in the folder and in the single file beside it, one sentence each."""
    problems = [*_files_problems(checkpoint)]
    yield from problems
    if checkpoint.spec.is_whole and not problems:
        from pipelines.whole_pipeline import part_problems

        yield from part_problems(cast("WholeSpec", checkpoint.spec), checkpoint.path)


def _files_problems(checkpoint: Checkpoint) -> Iterator[str]:
    parts = (part for part, entry in read_index(checkpoint.path).items() if isinstance(entry, list))
    unused = checkpoint.spec.unused_parts(checkpoint.path)
    for part in parts:
        is_replaced = checkpoint.file is not None and part in DENOISERS
        if part not in unused and not is_replaced:
            yield from _folder_problems(part_folder(checkpoint.path, part))
    if checkpoint.defaults.stage_scale:  # no index of a pipeline names it
        yield from _folder_problems(checkpoint.path / UPSAMPLER_FOLDER)
    if checkpoint.file is not None:
        yield from _file_problems(checkpoint.file, is_transformer=True)


def adapter_problems(checkpoint: Checkpoint, sources: Iterable[LoraSource]) -> Iterator[str]:
    """Yield the problems of local adapters; hub adapters are not downloaded yet."""
    for source in sources:
        if source.part and part_class(checkpoint.path, source.part) is None:
            yield f"an adapter for part {source.part!r}, which the model does not have"
        if (
            local_path(source.path).exists()
            or source.path.startswith(("/", ".", "~"))
            or source.path.endswith(".safetensors")
        ):
            try:
                yield from _file_problems(resolve_file(source.path, source.file, ADAPTER_FILES))
            except ValueError as error:
                yield str(error)


def decoder_problems(path: Path, *, compiled: bool, limits_memory: bool, num_devices: int) -> Iterator[str]:
    """Yield why the decoder in the folder ``path`` does not support an option. Import torch only if one is set."""
    name = part_class(path, "vae")
    if not (compiled or limits_memory or num_devices > 1) or name is None:
        return
    written = read_config(path, "vae")
    if name == PLAIN and set(written.get("up_block_types", ())) == {PLAIN_BLOCK}:
        return  # avoid imports, which take seconds
    import diffusers
    from accelerate import init_empty_weights  # type: ignore[import-untyped]

    from pipelines.vae.fused_clips import check_preparable
    from pipelines.vae.layers import check_decoder
    from pipelines.vae.multi_gpu import check_divisible

    with init_empty_weights():
        vae = getattr(diffusers, name).from_config(dict(written))
    try:
        if compiled:
            check_preparable(vae)
        if limits_memory:
            check_decoder(vae, "memory_gib")
        if num_devices > 1:
            check_divisible(vae)
    except ValueError as error:
        yield str(error)


def _folder_problems(folder: Path) -> Iterator[str]:
    if not (folder / "config.json").is_file():
        return  # a scheduler, a tokenizer, or a missing optional part
    try:
        quantiser_of(folder)
        lone_file(folder)
    except ValueError as error:
        yield str(error)
    for index in folder.glob(INDEX):
        try:
            names = set(json.loads(index.read_text())["weight_map"].values())
        except (ValueError, LookupError, TypeError) as error:
            yield f"{index} is no index of weights ({error}): download it again"
            continue
        if absent := sorted(name for name in names if not (folder / name).is_file()):
            yield f"{index} names files that are not there: {', '.join(absent)}. Download the model again"
    files = sorted(folder.glob(f"{SHOWN}{SAFETENSORS}"))
    for file in files or folder.glob(f"{SHOWN}{GGUF}"):
        yield from _file_problems(file)
    if files or any(True for pattern in OTHER_FORMATS for _ in folder.glob(pattern)):
        return
    pickled = sorted(file.name for pattern in UNREAD_FORMATS for file in folder.glob(pattern))
    if pickled:
        yield f"{folder} has {', '.join(pickled)}, which is not read: save it as safetensors"
    else:
        yield f"{folder} has no weights: download the whole model, not only its configuration"


def _file_problems(file: Path, *, is_transformer: bool = False) -> Iterator[str]:
    if file.suffix == GGUF:
        with file.open("rb") as opened:
            if opened.read(len(GGUF_MAGIC)) != GGUF_MAGIC:
                yield f"{file} is no GGUF file: download it again"
        return
    try:
        with safe_open(file, framework="numpy") as opened:
            opened.keys()
            if is_transformer:
                check_metadata(file, opened.metadata())
    except ValueError as error:
        yield str(error)
    except (SafetensorError, OSError) as error:
        yield f"{file} is no safetensors file, or not the whole of one ({error}): download it again"
