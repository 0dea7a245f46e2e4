"""Wan Animate 2: a character's picture, moved like the person in a driving clip (base model and distilled).

The driving clip's keys and values are computed once a job, whole on every rank. The result's tokens are divided. They
are ordered by place, then by frame (see ``attention``). Long clips are made in segments of 81 frames, each of which
continues the pixels of the one before: ranks have the auto-encoder too. A shorter clip is one segment of its length.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engines.core.shard_plan import ShardPlan, TokenGather, TokenShard
from pipelines.defaults import Defaults
from pipelines.directory import DEFAULTS_FILE, read_config, read_index, read_own
from pipelines.latent_sizes import latent_sizes, space_time_scales
from pipelines.models.spec import CLIP, Config, ModelSpec, distilled, lazy
from pipelines.models.wan_animate2.call import (
    DRIVING,
    DRIVING_PICTURE,
    DRIVING_TEXT,
    DRIVING_VIDEO,
    FINISHED,
    NEGATIVE,
    REFERENCE,
    num_tokens,
)
from pipelines.request import InputPictures, MediaRequest

if TYPE_CHECKING:
    from torch import Tensor

    from engines.core.model import Arguments

VIDEO = "video"
MAX_TOKENS = 512
PICTURE_TOKENS, PICTURE_DIM = 257, 1280
"""Tokens of a picture by CLIP: 16 x 16 patches and one token for all (arXiv:2103.00020, ViT-H/14 at 224)."""
SEGMENT = 81
"""Frames of a segment: the default of diffusers' blocks. A folder may have another number (``troupe.json``)."""
OVERLAP = 1
"""Frames of a segment that the next one continues: the default of diffusers' blocks."""
MAX_FRAMES = SEGMENT + 11 * (SEGMENT - OVERLAP)
"""40 s at 24 frames a second."""

BASE = replace(
    CLIP,
    width=640,
    height=800,
    num_frames=SEGMENT,
    num_inference_steps=40,
    true_cfg_scale=3.0,
    max_frames=MAX_FRAMES,
    min_pictures=1,
    max_pictures=1,
    needs_video=True,
    max_video_frames=MAX_FRAMES,
    takes_both=True,
    keeps_length=True,
    shaped_by_picture=True,
    max_tokens=MAX_TOKENS,
    frames_per_chunk=SEGMENT,
    chunk_overlap=OVERLAP,
)
"""Defaults of diffusers' blocks."""
DISTILLED = distilled(BASE, 10)

BLOCKS = "blocks"
PLAN = ShardPlan(
    streams=(VIDEO,),
    blocks=(BLOCKS,),
    shards=(
        TokenShard(module=f"{BLOCKS}.0", where="input", key="hidden_states", dim=1, stream=VIDEO),
        TokenShard(module=f"{BLOCKS}.*", where="input", key="rotary_emb", dim=1, stream=VIDEO),
        TokenShard(module=f"{BLOCKS}.*", where="input", key="grid_sizes", dim=0, stream=VIDEO),
    ),
    gathers=(TokenGather(module="head", dim=1, stream=VIDEO),),
    linears=(),
    free=(NEGATIVE,),
    reads_lse=True,
)
"""Weights stay whole: a rank with a share of them would pass over the driving clip in every step."""


class WanAnimate2Spec(ModelSpec):
    family = "wan_animate2"
    latent_channels = ("out_dim",)
    plan = PLAN
    fits_pictures = True
    decodes_frames_apart = True
    float32_parts = ("vae", "image_encoder")
    rank_parts = ("vae",)
    eager_only = "passes over the driving clip before its first step"
    forward = lazy("pipelines.models.wan_animate2.attention:forward")
    set_kernel = lazy("pipelines.models.wan_animate2.attention:set_kernel")
    patch_blocks = lazy("pipelines.models.wan_animate2.patches:patch_blocks")
    hoisted = lazy("pipelines.models.wan_animate2.attention:hoisted")
    """The driving clip's keys and values."""
    hoisted_inputs = (DRIVING, DRIVING_TEXT, DRIVING_PICTURE)
    num_hoisted = 1
    hoists_by_blocks = True

    def heads(self, config: Config) -> tuple[int, int]:
        return config["num_heads"], config["dim"] // config["num_heads"]

    def hoisted_features(self, config: Config) -> Mapping[str, int]:
        """Return keys and values of all blocks: the driving clip has a token for each of the result's."""
        return {VIDEO: 2 * int(config["num_layers"] * config["dim"])}

    def stream_lengths(self, config: Config, arguments: Arguments) -> dict[str, int]:
        return {VIDEO: num_tokens(config, arguments)}

    def blank_conditioning(self, config: Config, num_tokens: int) -> Mapping[str, Tensor]:
        """Return prompts of the maximum length: all are padded to it, and the padding is attended to."""
        import torch

        prompt = torch.zeros(1, config["text_len"], config["text_dim"])
        return {"prompt_embeds": prompt, "prompt_ref_embeds": prompt.clone()}

    def blank_pictures(self, path: Path, request: MediaRequest) -> Mapping[str, Any]:
        """Return the encoded picture, as the first of the result's latent frames, and the part that it fills."""
        import torch

        config, (frames, *sides) = read_config(path, "transformer"), self._latent_sizes(path, request)
        channels = config["in_dim"] - config["out_dim"]
        return {
            "encoder_hidden_states_image": torch.zeros(1, PICTURE_TOKENS, PICTURE_DIM),
            REFERENCE: torch.zeros(channels, frames + 1, *sides),
            "crop_region": (0, 0, request.height, request.width),
        }

    def blank_video(self, path: Path, request: MediaRequest) -> Mapping[str, Any]:
        import torch

        config, sizes = read_config(path, "transformer"), self._latent_sizes(path, request)
        num_segments = self.defaults(path).num_chunks(request.num_frames)
        return {
            DRIVING_VIDEO: torch.zeros(num_segments, config["out_dim"], *sizes),
            "condition_clip_context": torch.zeros(1, PICTURE_TOKENS, PICTURE_DIM),
            "real_frame_len": request.num_frames,
        }

    def _latent_sizes(self, path: Path, request: MediaRequest) -> tuple[int, ...]:
        segment = replace(request, num_frames=self._segment(path, request))
        return latent_sizes(segment, space_time_scales(path))

    def _segment(self, path: Path, request: MediaRequest) -> int:
        return min(request.num_frames, self.defaults(path).frames_per_chunk)

    def pipeline_inputs(self, path: Path, request: MediaRequest) -> Mapping[str, Any]:
        """Return a segment as long as the clip, if that is short enough."""
        return {"segment_frame_length": self._segment(path, request)}

    def place_pictures(self, path: Path, request: MediaRequest, pictures: InputPictures) -> Mapping[str, Any]:
        """Return the character's picture and the driving clip."""
        if pictures.video is None:
            return {}
        return {"image": pictures.pictures[0].on_white(), "driving_video": pictures.video.frames()}

    def first_frame(self, config: Config, latents: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the picture's latents, which are not decoded, and those of the first frame, of the newest segment."""
        return {"latents": latents["latents"][:, :2], FINISHED: []}

    def finished_chunk(self, loop_state: Any) -> Mapping[str, Any]:
        """Return the latents of the newest segment that is finished; empty before there is one."""
        finished = loop_state.finished_segments
        return {"latents": finished[-1], FINISHED: finished[:-1]} if finished else {}

    def defaults(self, path: Path) -> Defaults:
        """Return the defaults of diffusers' blocks, for the model that the index names.

        ValueError for a segment whose frames are no whole number of latent ones.
        """
        is_distilled = "Distilled" in str(read_index(path)["_class_name"])
        (spatial, temporal), patch = space_time_scales(path), read_config(path, "transformer")["patch_size"]
        return replace(
            DISTILLED if is_distilled else BASE,
            size_multiple=spatial * max(patch[1:]),
            frame_multiple=temporal,
            min_frames=1 + temporal,
            min_video_frames=1 + temporal,
            frames_per_chunk=self._own_segment(path, temporal),
        )

    def _own_segment(self, path: Path, temporal: int) -> int:
        length = read_own(path).get("frames_per_chunk", SEGMENT)
        if not isinstance(length, int) or length <= OVERLAP or (length - OVERLAP) % temporal:
            raise ValueError(
                f"{path / DEFAULTS_FILE}: frames_per_chunk is {length!r}; it must be {OVERLAP} more than a multiple of "
                f"{temporal}, as {SEGMENT} is"
            )
        return length


SPEC = WanAnimate2Spec()
