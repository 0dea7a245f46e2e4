"""Named ways to use a model: adapters, solver, steps and guidance as defaults of a request. Needs no torch.

The values of published recipes are in ``ModelSpec.recipes`` of each family.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from engines.core.spec import Attention
from pipelines.caching import CacheMode
from pipelines.lora.source import NAME, LoraSource, check_scale
from pipelines.request import Lora

FILES = ("path", "file", "path_2", "file_2", "scale")
"""Fields about the recipe's own adapter."""
ABOUT = ("likeness",)
LORAS = ("lora", "second_stage_lora")
PARTS = ("transformer", "transformer_2")


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """Defaults of the requests that name it. Empty and None: as the model has them."""

    path: str = ""
    """Its adapter: a file, a folder, a shipped checkpoint's name or a hub id. It has the recipe's name."""
    file: str = ""
    """The file in that folder or repository."""
    path_2: str = ""
    """The adapter of a second transformer."""
    file_2: str = ""
    """The file of ``path_2``, in its folder or repository."""
    scale: float | None = None
    """Scale of its adapter; None: 1."""
    lora: tuple[Lora, ...] = ()
    """Further adapters of the model, by name."""
    num_inference_steps: int | None = None
    """Number of steps."""
    guidance_scale: float | None = None
    """Distilled scale, of models that have one."""
    true_cfg_scale: float | None = None
    """Scale of classifier-free guidance; up to 1: none."""
    guidance_scale_2: float | None = None
    """``true_cfg_scale`` of the second transformer."""
    boundary_ratio: float | None = None
    """Share of the training's timesteps below which the second transformer is used."""
    scheduler: str = ""
    """A name in ``schedulers`` of the model."""
    flow_shift: float | None = None
    """Constant shift of the schedule, in place of one that depends on the size."""
    sigmas: tuple[float, ...] = ()
    """Noise levels of the steps before the shift, from high to low, without the final 0."""
    timesteps: tuple[float, ...] = ()
    """Timesteps of the steps, from high to low, instead of ``sigmas``."""
    second_stage_sigmas: tuple[float, ...] = ()
    """Noise levels of a second pass over enlarged latents. The recipe's own adapter is then for that pass alone."""
    second_stage_lora: tuple[Lora, ...] = ()
    """Further adapters of the second pass."""
    cache: CacheMode | None = None
    """Pattern of steps that reuse the previous prediction."""
    attention: Attention | None = None
    """Precision of attention, for models whose gang computes in another one."""
    likeness: float | None = None
    """Likeness to the model's own pictures, as it was measured."""

    def __post_init__(self) -> None:
        if (self.file and not self.path) or (self.path_2 and not self.path) or (self.file_2 and not self.path):
            raise ValueError("a recipe with file, path_2 or file_2 needs a path: a file, a folder or a hub id")
        if self.scale is not None:
            check_scale(self.scale)

    def over(self, base: Recipe) -> Recipe:
        """Return ``base`` with the values that this recipe has."""
        return replace(base, **self.values)

    @property
    def values(self) -> dict[str, Any]:
        """The fields that are set."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        return {name: value for name, value in values.items() if value is not None and value not in ("", ())}

    @property
    def settings(self) -> dict[str, Any]:
        """The fields of a request that it changes, its adapters aside."""
        return {name: value for name, value in self.values.items() if name not in (*FILES, *ABOUT, *LORAS)}

    def sources(self, name: str) -> tuple[LoraSource, ...]:
        """Return its own adapter, one for each transformer, under ``name``."""
        if not self.path:
            return ()
        scale = 1.0 if self.scale is None else self.scale
        if not self.path_2 and not self.file_2:
            return (LoraSource(path=self.path, file=self.file, name=name, scale=scale),)
        second = LoraSource(path=self.path_2 or self.path, file=self.file_2, name=name, scale=scale, part=PARTS[1])
        return (LoraSource(path=self.path, file=self.file, name=name, scale=scale, part=PARTS[0]), second)

    def loras(self, name: str, known: tuple[Lora, ...]) -> tuple[Lora, ...]:
        """Return its adapters, given those of the model: the one of its name, if there is one, and its others.

        With a second pass, these are those of the first.
        """
        return self.lora if self.second_stage_sigmas else (*self._own(name, known), *self.lora)

    def second_stage_loras(self, name: str, known: tuple[Lora, ...]) -> tuple[Lora, ...]:
        """Return the adapters of its second pass; none without one."""
        return (*self._own(name, known), *self.second_stage_lora) if self.second_stage_sigmas else ()

    def _own(self, name: str, known: tuple[Lora, ...]) -> tuple[Lora, ...]:
        return tuple(
            lora if self.scale is None else replace(lora, scale=self.scale) for lora in known if lora.name == name
        )


def check_recipe_name(name: str) -> None:
    """Raise ValueError for a name that a request cannot give behind its model's."""
    if not re.fullmatch(NAME, name):
        raise ValueError(f"{name!r} is no name for a recipe: letters, digits, points, dashes, underscores")


def merged(configured: Mapping[str, Recipe], shipped: Mapping[str, Recipe]) -> dict[str, Recipe]:
    """Return the ``configured`` recipes, each over the one of its name that the family ships.

    ValueError for one that changes nothing.
    """
    recipes = {name: recipe.over(shipped.get(name, NO_RECIPE)) for name, recipe in configured.items()}
    for name, recipe in recipes.items():
        if not recipe.values:
            known = ", ".join(shipped) or "none"
            raise ValueError(f"the recipe {name} changes nothing; recipes that ship with this model's family: {known}")
    return recipes


NO_RECIPE = Recipe()
