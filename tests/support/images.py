"""The targets of containers/Dockerfile, each as the list of its instructions."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from dockerfile_parse import DockerfileParser

from tests.support.fenced import ROOT

DOCKERFILE = ROOT / "containers" / "Dockerfile"
CPU, CUDA = "cpu", "cuda"


@dataclass(frozen=True, kw_only=True, slots=True)
class Instruction:
    name: str
    value: str

    @property
    def words(self) -> list[str]:
        """Return the words of the exec form (a JSON array), or of a line."""
        return list(json.loads(self.value)) if self.value.startswith("[") else shlex.split(self.value)


@dataclass(frozen=True, kw_only=True, slots=True)
class Image:
    """A target with its stages; ``arguments`` has the defaults of ``ARG``."""

    instructions: tuple[Instruction, ...]
    arguments: Mapping[str, str] = field(default_factory=dict)

    def all(self, name: str) -> list[Instruction]:
        return [one for one in self.instructions if one.name == name]

    def last(self, name: str) -> Instruction:
        return self.all(name)[-1]

    @property
    def environment(self) -> dict[str, str]:
        return dict(word.split("=", 1) for one in self.all("ENV") for word in one.words)

    @property
    def sources(self) -> list[str]:
        """Return the sources copied from the repository."""
        return [source for one in self.all("COPY") for source in one.words[:-1]]


def image(target: str) -> Image:
    instructions = tuple(_instructions(_stages(), target))
    pairs = (one.value.partition("=") for one in instructions if one.name == "ARG")
    return Image(instructions=instructions, arguments={name: value for name, _, value in pairs})


def _stages() -> dict[str, tuple[str, list[Instruction]]]:
    """Return instructions by stage, after the image or the stage that it begins with."""
    stages: dict[str, tuple[str, list[Instruction]]] = {}
    current: list[Instruction] = []
    for part in DockerfileParser(path=str(DOCKERFILE)).structure:
        one = Instruction(name=part["instruction"], value=part["value"])
        if one.name == "FROM":
            parent, _, name = one.words
            stages[name] = (parent, current := [])
        elif one.name != "COMMENT":
            current.append(one)
    return stages


def _instructions(stages: Mapping[str, tuple[str, list[Instruction]]], name: str) -> Iterator[Instruction]:
    parent, own = stages[name]
    if parent in stages:
        yield from _instructions(stages, parent)
    yield from own
