"""Wan VACE: Wan with a second stack of blocks, for a clip that it follows, a mask of each frame, and pictures.

Diffusers has blocks for Wan 2.2, with two transformers. They serve the one of Wan 2.1 too (``patches``).

Control tokens are as many as the result's, in the same order, and are divided alike: what a control block adds to the
result's tokens stays on their rank. Pictures are latent frames before the clip's, which the decoder does not get.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engines.core.shard_plan import ShardPlan, TokenGather, TokenShard
from pipelines.defaults import Defaults
from pipelines.directory import read_config, read_index
from pipelines.latent_sizes import latent_sizes, space_time_scales
from pipelines.models.linears import attention_linears, mlp_linears, query_key_norms
from pipelines.models.spec import Config, lazy
from pipelines.models.wan.spec import LARGE, SHARDS, SMALL_SIZE, VIDEO, WanSpec
from pipelines.recipes import Recipe
from pipelines.request import InputPictures, MediaRequest

if TYPE_CHECKING:
    from torch import Tensor

CONTROL, SCALES, NUM_PICTURES = "control_hidden_states", "control_hidden_states_scale", "num_reference_images"
"""Values of diffusers' blocks: the encoded clip with its mask, its weight in each control block, and a number."""
STACKS = ("vace_blocks", "blocks")
"""Control blocks run before all others."""
ATTENTIONS = tuple(f"{stack}.*.{attention}" for stack in STACKS for attention in ("attn1", "attn2"))
MAX_FRAMES, MAX_PICTURES = 257, 4

VACE = replace(
    LARGE,
    **SMALL_SIZE,
    true_cfg_scale=5.0,
    max_frames=MAX_FRAMES,
    max_pictures=MAX_PICTURES,
    max_video_frames=MAX_FRAMES,
    takes_both=True,
    keeps_length=True,
    masks_video=True,
    control_scale=1.0,
)
"""Defaults of diffusers' pipeline, for a transformer or two."""

PLAN = ShardPlan(
    streams=(VIDEO,),
    blocks=STACKS,
    shards=(
        *SHARDS,
        TokenShard(module="vace_blocks.0", where="input", key="hidden_states", dim=1, stream=VIDEO),
        TokenShard(module="vace_blocks.0", where="input", key=CONTROL, dim=1, stream=VIDEO),
    ),
    gathers=(TokenGather(module="proj_out", dim=1, stream=VIDEO),),
    linears=(
        *attention_linears(*ATTENTIONS),
        *query_key_norms(*ATTENTIONS),
        *(rule for stack in STACKS for rule in mlp_linears(f"{stack}.*.ffn")),
    ),
)
"""Blocks of one stack need what the other returned: ranks cannot have some of them each."""


class WanVaceSpec(WanSpec):
    family = "wan_vace"
    fits_pictures = False
    has_video_values = True
    patch_blocks = lazy("pipelines.models.wan_vace.patches:patch_blocks")

    def shard_plan(self, config: Config) -> ShardPlan:
        return PLAN

    def blank_pictures(self, path: Path, request: MediaRequest) -> Mapping[str, Tensor]:
        """Return nothing: pictures are part of ``blank_video``."""
        return {}

    def blank_video(self, path: Path, request: MediaRequest) -> Mapping[str, Any]:
        """Return the encoded clip, without one too, with the pictures before it, and its weights."""
        import torch

        config, (frames, *sides) = (read_config(path, "transformer"), latent_sizes(request, space_time_scales(path)))
        return {
            CONTROL: torch.zeros(1, config["vace_in_channels"], request.num_pictures + frames, *sides),
            SCALES: torch.ones(len(config["vace_layers"])),
            NUM_PICTURES: request.num_pictures,
        }

    def place_pictures(self, path: Path, request: MediaRequest, pictures: InputPictures) -> Mapping[str, Any]:
        """Return the inputs by the names of the blocks' inputs; pictures unchanged."""
        placed: dict[str, Any] = {}
        if pictures.pictures:
            placed["reference_images"] = [picture.on_white() for picture in pictures.pictures]
        if pictures.video_mask is not None:
            placed["mask"] = pictures.video_mask.frames()
        return placed

    def extend_blocks(self, blocks: Any, path: Path) -> None:
        if read_index(path).get("boundary_ratio") is None:
            lazy("pipelines.models.wan_vace.patches:keep_one_transformer")(blocks)

    def recipes(self, path: Path) -> Mapping[str, Recipe]:
        """Return none: those of Wan were published for its own transformers."""
        return {}

    def defaults(self, path: Path) -> Defaults:
        (spatial, temporal), patch = space_time_scales(path), read_config(path, "transformer")["patch_size"]
        return replace(VACE, size_multiple=self.size_multiple(spatial, patch), frame_multiple=temporal)


SPEC = WanVaceSpec()
