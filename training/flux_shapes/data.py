"""Training data of flux-shapes: latent pools of every picture size, and the captions' tokens and labels."""

import random
from dataclasses import dataclass
from functools import partial

import torch
from diffusers import AutoencoderKL
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedTokenizerBase

from training.pool import CaptionedDrawings, LatentPool, token_ids, with_dropout
from training.shapes.draw import draw
from training.shapes.tokens import MAX_LENGTH

MAIN_SIZE = (128, 128)
SIZES = {MAIN_SIZE: 11, (96, 96): 2, (96, 128): 2, (128, 96): 2, (64, 64): 1, (160, 160): 2}
OTHERS_FROM = 0.4  # progress from which the other sizes are shown too
REFRESH_EVERY = 8
LONG_LENGTH = 512  # tokens that diffusers pads a prompt to unless another length is given
LONG_SHARE = 4  # a step with long prompts has so much smaller a batch
Size = tuple[int, int]
Tokenizers = tuple[PreTrainedTokenizerBase, PreTrainedTokenizerBase]


@dataclass(frozen=True, kw_only=True, slots=True)
class Shown:
    """Form of one step's batch: pictures of one size, and prompts padded to one length."""

    size: Size
    num_tokens: int = MAX_LENGTH

    @property
    def is_long(self) -> bool:
        return self.num_tokens > MAX_LENGTH

    def batch(self, usual: int) -> int:
        """Return how many pictures the step shows."""
        return max(usual // LONG_SHARE, 1) if self.is_long else usual


class PictureDataset:
    """Latents and captions, all on the device. One step in `long_every` has prompts of the next of `long_lengths`."""

    long_every = 8
    long_lengths: tuple[int, ...] = (LONG_LENGTH, 128, LONG_LENGTH, 256)

    def __init__(
        self,
        stills: CaptionedDrawings,
        vae: AutoencoderKL,
        tokenizers: Tokenizers,
        *,
        pool: int,
        chunk: int,
        device: str,
        graph: bool,
    ) -> None:
        self.vae, self.drawings = vae, stills.drawings.to(device)
        self.clip_tokenizer, self.t5_tokenizer = tokenizers
        self.clip_ids = token_ids(self.clip_tokenizer, stills.captions).to(device)
        self.t5_ids = token_ids(self.t5_tokenizer, stills.captions).to(device)
        self.labels = stills.labels.to(device)
        self.empty = len(stills.captions)
        self.rng, self.steps = random.Random(0), 0
        total = sum(SIZES.values())
        self.pools = {size: self._pool(size, pool * n // total, chunk, device, graph) for size, n in SIZES.items()}

    def _pool(self, size: Size, rows: int, chunk: int, device: str, graph: bool) -> LatentPool:
        return LatentPool(
            partial(self._latents, size), num_rows=self.empty, size=rows, chunk=chunk, device=device, graph=graph
        )

    def _latents(self, size: Size, row: Tensor) -> Tensor:
        """Return new latents of these rows' drawings."""
        return self._encoded(draw(self.drawings[row], height=size[0], width=size[1])[:, :, 0])

    def _encoded(self, pixels_NCHW: Tensor) -> Tensor:
        with torch.autocast(pixels_NCHW.device.type, torch.bfloat16):
            mean: Tensor = self.vae.encode(pixels_NCHW).latent_dist.mean
        scaled: Tensor = (mean.float() - self.vae.config.shift_factor) * self.vae.config.scaling_factor
        return scaled

    def next_size(self, progress: float) -> Size:
        """Return the size of the next step's pictures; now and then it puts new ones in their pool."""
        shown = SIZES if progress >= OTHERS_FROM else {MAIN_SIZE: 1}
        size = self.rng.choices(tuple(shown), tuple(shown.values()))[0]
        self.steps += 1
        if self.steps % REFRESH_EVERY == 0:
            self.pools[size].refresh()
        return size

    @property
    def kinds(self) -> tuple[Shown, ...]:
        """All forms that steps may show."""
        return (
            *(Shown(size=size) for size in SIZES),
            *(Shown(size=MAIN_SIZE, num_tokens=length) for length in dict.fromkeys(self.long_lengths)),
        )

    def next_shown(self, progress: float) -> Shown:
        """Return what the next step shows; now and then it puts new pictures in a pool."""
        size, (rounds, rest) = self.next_size(progress), divmod(self.steps, self.long_every)
        if rest == 1 and progress >= OTHERS_FROM:
            return Shown(size=MAIN_SIZE, num_tokens=self.long_lengths[rounds % len(self.long_lengths)])
        return Shown(size=size)

    def words(self, row_B: Tensor, num_tokens: int = MAX_LENGTH) -> tuple[Tensor, Tensor]:
        """Return the token ids (B, 48) for CLIP and (B, `num_tokens`) for T5."""
        padding = num_tokens - MAX_LENGTH
        t5_ids = functional.pad(self.t5_ids[row_B], (0, padding), value=self.t5_tokenizer.pad_token_id)
        return self.clip_ids[row_B], t5_ids

    def sample(self, size: Size, batch: int) -> tuple[Tensor, Tensor]:
        """Return latents of this size and the rows of their captions, some of them the empty prompt's."""
        latents, row = self.pools[size].sample(batch)
        return latents, with_dropout(row, self.empty)
