"""A transformer as one safetensors file, as many are shared, beside a folder that has all else.

It is named ``FILE.safetensors@BASE``, where ``BASE`` is whatever a model may be named by.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

SUFFIX, AT = ".safetensors", "@"


def with_base(file: str, base: str) -> str:
    """Returns the name of a model of which ``file`` is the transformer and ``base`` all else; without a base it is
    ``file``, whatever that names. ValueError for a base beside anything else than a file.
    """
    if base and not file.endswith(SUFFIX):
        raise ValueError(f"base is {base!r}, which stands beside a {SUFFIX} file, and path is {file!r}: leave base out")
    return f"{file}{AT}{base}" if base else file


def split_source(source: str) -> tuple[Path | None, str]:
    """Returns the file and the base that a model's name consists of; no file, and the name, for any other.

    ValueError for a file that has no base, or that is not there.
    """
    name, at, base = source.partition(SUFFIX + AT)
    if not at and not source.endswith(SUFFIX):
        return None, source
    if not base:
        raise ValueError(
            f"{source} is a transformer alone: say where the rest is, as base: FOLDER (or a hub id) in a "
            f"configuration, or {source}{AT}FOLDER on the command line"
        )
    file = Path(name + SUFFIX)
    if not file.is_file():
        raise ValueError(f"there is no file {file}; {base} is what it is to replace the transformer of")
    return file, base


def load_single_file(kind: Any, file: Path, config: Path, device: torch.device) -> Any:
    """Loads a model of diffusers' class ``kind`` by the configuration in the folder ``config``, in the file's dtypes.

    The file is in diffusers' names or in those of the model's makers, which diffusers knows. ValueError where diffusers
    reads no such class from one file, or where it is another model's.
    """
    from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES

    if kind.__name__ not in SINGLE_FILE_LOADABLE_CLASSES:
        known = ", ".join(sorted(SINGLE_FILE_LOADABLE_CLASSES))
        raise ValueError(f"diffusers reads no {kind.__name__} from one file ({file}): give a folder; it reads {known}")
    try:
        return kind.from_single_file(str(file), config=str(config), device=device)
    except (
        LookupError,
        RuntimeError,
        ValueError,
    ) as error:  # a weight that is missing stays on "meta", and fails there
        raise ValueError(
            f"{file} is not the whole {kind.__name__} that {config} describes: give the base it was made of ({error})"
        ) from error
