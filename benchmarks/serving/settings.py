"""Configuration that a benchmark serves: a shipped one or a file, with other values and another model."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import yaml

from deployments.cli.serving import load_config, parse_config
from deployments.config import ServeConfig

T = TypeVar("T")

FULL = "full"
"""The name of a model that was given as a folder."""


def add_options(parser: argparse.ArgumentParser, *, config: str = "laptop", model: bool = True) -> None:
    """Add ``--config``, ``--set`` and ``--folder``, and ``--model`` unless the program has its own."""
    parser.add_argument("--config", default=config, help="a config file, or the name of a shipped one")
    parser.add_argument(
        "--set",
        nargs="+",
        action="extend",
        default=[],
        metavar="KEY=VALUE",
        help="of every model, as the config file would say it: denoiser.elastic=true",
    )
    parser.add_argument(
        "--folder", type=Path, help="of a model in diffusers' layout, which is served alone, in place of the first one"
    )
    if model:
        parser.add_argument(
            "--model", help="a published model: written to --folder if nothing is there, with random weights"
        )


def argument_type(read: Callable[[str], T]) -> Callable[[str], T]:
    """Return ``read`` for argparse, which hides the message of a ValueError."""

    def typed(words: str) -> T:
        try:
            return read(words)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return typed


def add_part_options(parser: argparse.ArgumentParser, parts: Mapping[str, T], usual: Iterable[str]) -> None:
    """Add ``--parts``, some of ``parts``, and ``--out``."""
    parser.add_argument(
        "--parts",
        type=argument_type(partial(find_parts, parts)),
        default=",".join(usual),
        help=f"some of {','.join(parts)}",
    )
    parser.add_argument("--out", type=Path, help="file for the document, also of an unfinished run")


def find_parts(parts: Mapping[str, T], names_with_commas: str) -> dict[str, T]:
    """Return the named ``parts`` in their own order. ValueError lists the known names."""
    names = names_with_commas.split(",")
    if unknown := [name for name in names if name not in parts]:
        raise ValueError(f"unknown part {unknown[0]!r}; known: {', '.join(parts)}")
    return {name: part for name, part in parts.items() if name in names}


def config_of(arguments: argparse.Namespace) -> ServeConfig:
    """Return the configuration of the options, and write the model if needed. ValueError says what is wrong."""
    config = load_config(arguments.config)
    if arguments.folder is not None:
        if arguments.model is not None and not arguments.folder.exists():
            write_model(arguments.model, arguments.folder)
        config = with_folder(config, arguments.folder)
    elif arguments.model is not None:
        raise ValueError(f"--model {arguments.model} needs a --folder that it lies in, or is written to")
    return with_values(config, arguments.set)


def write_model(name: str, folder: Path, *, twins: bool = False) -> None:
    """Write the published model ``name`` with random weights, made on the GPU if there is one.

    ``twins`` is that of ``write_folder``.
    """
    import torch

    from benchmarks.models.folders import write_folder

    write_folder(name, folder, torch.device("cuda" if torch.cuda.is_available() else "cpu"), twins=twins)
    torch.cuda.empty_cache()


def with_folder(config: ServeConfig, folder: Path) -> ServeConfig:
    """Return ``config`` with only the model in ``folder``, in place of its first one. ValueError without a folder."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder; --model names what is written there")
    document = config.model_dump(mode="json")
    args = document["applications"][0]["args"]
    args["models"] = [{**args["models"][0], "name": FULL, "path": str(folder.resolve()), "base": ""}]
    return parse_config(document)


def with_values(config: ServeConfig, settings: Sequence[str]) -> ServeConfig:
    """Return ``config`` with other values in every model.

    A setting is a dotted key of a model's section, "=", and YAML. ValueError for others, and for values that the
    configuration refuses.
    """
    document = config.model_dump(mode="json")
    for one in settings:
        key, equals, value = one.partition("=")
        if not equals:
            raise ValueError(f"{one!r} sets nothing; write KEY=VALUE, such as denoiser.elastic=true")
        for model in document["applications"][0]["args"]["models"]:
            _put(model, key.split("."), _parsed(one, value))
    return parse_config(document)


def _parsed(setting: str, value: str) -> Any:
    try:
        return yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ValueError(f"the value of {setting!r} is not YAML: {' '.join(str(error).split())}") from error


def _put(section: dict[str, Any], path: Sequence[str], value: Any) -> None:
    for name in path[:-1]:
        if not isinstance(section.get(name), dict):  # a section that the configuration leaves out
            section[name] = {}
        section = section[name]
    section[path[-1]] = value
