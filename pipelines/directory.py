"""Read a diffusers directory: configurations and the index of parts, as plain JSON. Make one of links to others.

The classic index names the class of each part, whose folder has the part's name. The modular index also names each
part's location: here, in another folder, or in a repository of the hub.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

U_NET = "unet"
"""The part that makes predictions in pipelines older than transformers."""
DENOISERS = ("transformer", "transformer_ref", U_NET)
"""Parts that make predictions."""
DEFAULTS_FILE = "troupe.json"
"""Defaults of requests that a folder has in place of its family's."""
CLASSIC_INDEX, MODULAR_INDEX = "model_index.json", "modular_model_index.json"
CONFIG_FILES = {"scheduler": "scheduler_config.json", "tokenizer": "tokenizer_config.json"}
PLACE, SUBFOLDER, CLASS = "pretrained_model_name_or_path", "subfolder", "type_hint"
"""Keys of the modular index for a part's location and class."""
SAFETENSORS, GGUF = ".safetensors", ".gguf"
SHOWN = "[!.]*"
"""Pattern of files that are not hidden: macOS leaves a ``._`` file beside each on other file systems."""
USUAL = re.compile(r"(diffusion_pytorch_model|pytorch_model|model)([.-].+)?\.(safetensors|bin)")
"""Beginnings of the names that diffusers and transformers look for, of an index too."""
QUANTIZATION = "quantization_config"
"""Key in the configuration of a part that a library has quantised."""
PACKAGES = {"bitsandbytes": "bitsandbytes", "torchao": "torchao"}
"""Packages by the names that configurations have for quantisers: those whose transformers are read here."""
OWN_CLASS = "_class_name"
"""Key in the configuration of diffusers' classes, which those of transformers lack."""
BITS = ("_4bit", "_8bit")
"""Ends of names in transformers' list of quantisers that configurations lack."""
CLASSIC, MODULAR, FROM_PICTURE, CONTROLLED = "Pipeline", "ModularPipeline", "ImageToVideo", "ControlNet"
"""Parts of the names of pipeline classes."""
NO_FOLDERS: Mapping[str, Path] = {}
LIBRARY = "troupe"
"""Place of folders with links in the Hugging Face cache."""
OWN_INPUTS = ("VideoToVideo", "Control")
"""Parts of the names of pipelines that take what modular blocks for the same transformer do not."""


def read_config(path: Path, part: str) -> Mapping[str, Any]:
    """Return the configuration of one part ("transformer", "vae", "scheduler" …). ValueError if the file is missing."""
    name = CONFIG_FILES.get(part.removesuffix("_2"), "config.json")
    return _read_json(part_folder(path, part) / name)


def read_index(path: Path) -> Mapping[str, Any]:
    """Return the pipeline's parts and settings. ValueError if the folder has neither form of index."""
    return _read_json(_index_file(path))


def read_own(path: Path) -> dict[str, Any]:
    """Return the contents of ``path/troupe.json``, empty if there is none. ValueError if it is no JSON object."""
    file = path / DEFAULTS_FILE
    try:
        own: Any = json.loads(file.read_text("utf-8"), parse_constant=_refuse) if file.is_file() else {}
    except ValueError as error:
        raise ValueError(f"{file} is no JSON: {error}") from error
    if not isinstance(own, dict):
        raise ValueError(f"{file} is no JSON object")
    return own


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON number")


def changed_at_s(path: Path) -> int:
    """Return the mtime of the folder's index, in Unix seconds. OSError if there is none."""
    return int(_index_file(path).stat().st_mtime)


def quantiser_of(folder: Path) -> str:
    """Return the library that quantised the weights of a part, as its configuration says; empty if none did.

    ValueError if it is unknown, or its package is missing.
    """
    file = folder / "config.json"
    config = _read_json(file) if file.is_file() else {}
    quantization = config.get(QUANTIZATION) or {}
    if not quantization:
        return ""
    quantiser = str(quantization.get("quant_method") or "")
    package = PACKAGES.get(quantiser)
    if package is None:
        _check_quantiser(folder, quantiser, is_own=OWN_CLASS in config)
    elif find_spec(package) is None:
        raise ValueError(f"{folder} is quantised by {quantiser}, whose package is missing: pip install {package}")
    return quantiser


def _check_quantiser(folder: Path, quantiser: str, *, is_own: bool) -> None:
    """Raise ValueError for a quantiser without an entry in ``PACKAGES``, unless transformers reads its encoders."""
    known = dict.fromkeys(PACKAGES)
    if not is_own:
        from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

        known |= dict.fromkeys(name.removesuffix(BITS[0]).removesuffix(BITS[1]) for name in AUTO_QUANTIZER_MAPPING)
    if quantiser not in known:
        raise ValueError(unknown_quantiser(str(folder), quantiser, known))


def unknown_quantiser(where: str, quantiser: str, known: Iterable[str]) -> str:
    """Return the message for weights of a ``quantiser`` that nothing reads; ``known`` are those that are read."""
    names = ", ".join(f"{name} (pip install {PACKAGES[name]})" if name in PACKAGES else name for name in known)
    return (
        f"{where} is quantised by {quantiser or 'an unnamed quantiser'}, which is not known here: take weights of "
        f"{names}, a GGUF file, or the weights that were quantised"
    )


def check_package(file: Path) -> None:
    """Raise ValueError if ``file`` is a GGUF file and the package that reads these is missing."""
    if file.suffix == GGUF and find_spec("gguf") is None:
        raise ValueError(f"{file} needs the package gguf: pip install '.[gguf]'")


def open_gguf(file: Path) -> Any:
    """Return the reader of a GGUF file. ValueError for a damaged file, or if the package that reads it is missing."""
    check_package(file)
    from gguf import GGUFReader

    try:
        return GGUFReader(file)
    except (OSError, ValueError, IndexError, KeyError) as error:
        raise ValueError(f"{file} is no GGUF file, or not the whole of one ({error})") from error


def lone_file(folder: Path) -> Path | None:
    """Return the one safetensors or GGUF file that holds a part's weights, under a name that no library looks for.

    None if there are files of the usual names, or none at all. ValueError if there are several, or the package that
    reads them is missing.
    """
    if any(USUAL.match(file.name) for file in folder.glob("*")):
        return None
    files = sorted(file for file in folder.glob(SHOWN) if file.suffix in (SAFETENSORS, GGUF))
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise ValueError(
            f"{folder} has {names}: leave one of these files there, or files of the libraries' usual names"
        )
    for file in files:
        check_package(file)
    return files[0] if files else None


def part_class(path: Path, part: str) -> str | None:
    """Return the class that the index names for a part; None if there is no such part."""
    entry = read_index(path).get(part)
    if not isinstance(entry, list) or len(entry) < 2:
        return None
    name: str | None = entry[1] or _place(entry).get(CLASS, (None, None))[1]
    return name


def part_folder(path: Path, part: str) -> Path:
    """Return the folder of a part: the local one, as diffusers prefers it, or the modular index's location.

    ValueError if the part's repository is not in the hub cache.
    """
    place = _place(read_index(path).get(part)) if path.is_dir() and (path / MODULAR_INDEX).is_file() else {}
    inner = place.get(SUBFOLDER) or ""
    here = path / (inner or part)
    elsewhere = place.get(PLACE)
    if elsewhere is None or (here.is_dir() and any(here.iterdir())):
        return here
    return (Path(elsewhere) if Path(elsewhere).is_dir() else _cached(elsewhere)) / inner


def has_part(path: Path, part: str) -> bool:
    """Return whether a part with a configuration is there: a modular index names all that blocks may have."""
    return part_class(path, part) is not None and (part_folder(path, part) / "config.json").is_file()


def repositories(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the hub repositories, each with a folder in it, of parts that are not local."""
    if not (path / MODULAR_INDEX).is_file():
        return
    for part, entry in read_index(path).items():
        place = _place(entry)
        elsewhere, inner = place.get(PLACE), place.get(SUBFOLDER) or ""
        if elsewhere is not None and not (path / (inner or part)).is_dir() and not Path(elsewhere).is_dir():
            yield elsewhere, inner


def _index_file(path: Path) -> Path:
    modular = path / MODULAR_INDEX
    return modular if modular.is_file() else path / CLASSIC_INDEX


def _place(entry: Any) -> Mapping[str, Any]:
    """Return the location of a part in the modular index."""
    if isinstance(entry, list) and len(entry) == 3 and isinstance(entry[2], dict):
        return entry[2]
    return {}


def _cached(repository: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(repository, local_files_only=True))
    except LocalEntryNotFoundError as error:
        raise ValueError(f"{repository!r} is no folder here, and not in the hub cache: run `hf download`") from error


def _read_json(file: Path) -> Mapping[str, Any]:
    if not file.is_file():
        raise ValueError(f"{file.parent} is not part of a diffusers directory: it has no {file.name}")
    try:
        contents: Mapping[str, Any] = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file} is no JSON ({error}): download it again") from error
    return contents


def open_modular(path: Path) -> Any:
    """Return the modular pipeline of a folder, without weights. ValueError if diffusers has no blocks for it."""
    import diffusers

    name = str(read_index(path).get("_class_name"))
    try:
        pipeline = diffusers.ModularPipeline.from_pretrained(str(path))
        if not pipeline.blocks.sub_blocks and (same := _modular_class(path, name)) is not None:
            pipeline = same(pretrained_model_name_or_path=str(path))
    except (OSError, AttributeError, ValueError, TypeError) as error:
        if (same := _modular_class(path, name)) is None:
            raise ValueError(f"{_refusal(path, name)} ({error})") from error
        pipeline = same(pretrained_model_name_or_path=str(path))
    if not pipeline.blocks.sub_blocks:
        raise ValueError(_refusal(path, name))
    return pipeline


def has_blocks(path: Path) -> bool:
    """Return whether diffusers has modular blocks for the folder's pipeline."""
    try:
        open_modular(path)
    except ValueError:
        return False
    return True


def has_own_inputs(path: Path) -> bool:
    """Return whether the folder's pipeline takes a clip or a control picture, which other blocks do not."""
    return any(word in str(read_index(path).get("_class_name")) for word in OWN_INPUTS)


def pipelines_with_blocks() -> tuple[str, ...]:
    """Return the classes of diffusers' modular pipelines, named after the classic ones."""
    from diffusers.modular_pipelines.modular_pipeline import MODULAR_PIPELINE_MAPPING

    return tuple(sorted({make() for make in MODULAR_PIPELINE_MAPPING.values()}))


def linked_folder(
    model: Path, folders: str, key: str, entries: Mapping[str, object], others: Mapping[str, Path] = NO_FOLDERS
) -> Path:
    """Return a folder with the index ``entries``, and links to the parts of ``model`` and to ``others`` by name.

    It lies among ``folders`` of the cache, the same for equal ``key``. Its index is as old as the model's. ValueError
    if the model cannot be read, or the cache cannot be written.
    """
    from huggingface_hub import cached_assets_path

    model, index = model.resolve(), json.dumps(entries, indent=2)
    try:
        own, age = _index_file(model), _index_file(model).stat()
        targets = {path.name: path for path in model.iterdir() if path.name not in (CLASSIC_INDEX, MODULAR_INDEX)}
    except OSError as error:
        raise ValueError(
            f"the model's folder {model} cannot be read ({error}): let this user read it and its index"
        ) from error
    try:
        folder = Path(cached_assets_path(LIBRARY, folders, hashlib.sha256(key.encode()).hexdigest()[:16]))
        for name, target in {**targets, **others}.items():
            with suppress(FileExistsError):
                (folder / name).symlink_to(target)
        _write_index(folder / own.name, index, age)
    except OSError as error:
        raise ValueError(
            f"no links to {model} can be made ({error}): set HF_ASSETS_CACHE to a folder that can be written"
        ) from error
    return folder


def _write_index(written: Path, index: str, age: os.stat_result) -> None:
    """Write ``index`` into the file ``written``, with the times of ``age``, if either differs."""
    if written.is_file() and written.read_text() == index and written.stat().st_mtime_ns == age.st_mtime_ns:
        return
    new = written.with_name(f"{written.name}.{secrets.token_hex(8)}")  # other processes may make the same folder
    new.write_text(index)
    os.utime(new, ns=(age.st_atime_ns, age.st_mtime_ns))
    new.replace(written)


def _modular_class(path: Path, name: str) -> Any:
    """Return the modular class by name and settings; diffusers' own search covers only ``AutoPipeline``."""
    import diffusers
    from diffusers.modular_pipelines.modular_pipeline import MODULAR_PIPELINE_MAPPING

    plain = name.removesuffix(CLASSIC).removesuffix(FROM_PICTURE).removesuffix(CONTROLLED)
    modular = name if name.endswith(MODULAR) else plain + MODULAR
    special = (
        make(read_index(path))
        for kind, make in MODULAR_PIPELINE_MAPPING.items()
        if make() == modular or kind.replace("-", "") == plain.lower()
    )
    return getattr(diffusers, next(special, modular), None) if modular != MODULAR else None


def _refusal(path: Path, name: str) -> str:
    known = ", ".join(pipelines_with_blocks())
    return f"diffusers has no blocks for the {name} in {path}; it has {known}, and for classic pipelines of these names"
