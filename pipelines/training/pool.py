"""Captioned drawings as tensors, and a rolling pool of their latents, so that a step does not wait for the encoder."""

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from pipelines.training.captions import caption, motion_caption
from pipelines.training.draw import Drawings, motion_drawings, still_drawings
from pipelines.training.scenes import training_motion_scene, training_scene
from pipelines.training.tokens import MAX_LENGTH

PROMPT_DROPOUT = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class Captioned:
    """N drawings and their captions."""

    drawings: Drawings
    captions: list[str]


def captioned_stills(count: int, seed: int) -> Captioned:
    """Still scenes that training may show, with captions."""
    rng = random.Random(seed)
    scenes = [training_scene(rng) for _ in range(count)]
    return Captioned(drawings=still_drawings(scenes), captions=[caption(scene, rng) for scene in scenes])


def captioned_motions(count: int, seed: int) -> Captioned:
    """Video scenes that training may show, with captions."""
    rng = random.Random(seed)
    scenes = [training_motion_scene(rng) for _ in range(count)]
    return Captioned(drawings=motion_drawings(scenes), captions=[motion_caption(scene, rng) for scene in scenes])


def token_ids(tokenizer: PreTrainedTokenizerBase, captions: list[str]) -> Tensor:
    """Token ids (N, 48), padded; the row after the last one is the empty prompt."""
    padded = tokenizer([*captions, ""], padding="max_length", max_length=MAX_LENGTH, truncation=True)
    return torch.tensor(padded["input_ids"], dtype=torch.int16)


def with_dropout(row_B: Tensor, empty: int) -> Tensor:
    """Replaces one row in ten by the row of the empty prompt."""
    dropped = torch.rand(row_B.shape, device=row_B.device) < PROMPT_DROPOUT
    return torch.where(dropped, empty, row_B)


class LatentPool:
    """A ring of latents with the rows of their captions; every refresh replaces the oldest by new drawings."""

    def __init__(
        self, encode: Callable[[Tensor], Tensor], *, num_rows: int, size: int, chunk: int, device: str
    ) -> None:
        self.encode, self.num_rows, self.chunk, self.next = encode, num_rows, chunk, 0
        self.size = max(size // chunk, 1) * chunk
        self.row = torch.empty(self.size, dtype=torch.long, device=device)
        self.latents: Tensor | None = None
        for _ in range(self.size // chunk):
            self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Draws and encodes one chunk."""
        row = torch.randint(self.num_rows, (self.chunk,), device=self.row.device)
        fresh = self.encode(row)
        if self.latents is None:
            self.latents = torch.empty((self.size, *fresh.shape[1:]), dtype=torch.bfloat16, device=fresh.device)
        self.latents[self.next : self.next + self.chunk] = fresh
        self.row[self.next : self.next + self.chunk] = row
        self.next = (self.next + self.chunk) % self.size

    def sample(self, batch: int) -> tuple[Tensor, Tensor]:
        """Latents (B, ...) in float32 and the rows (B,) of their captions."""
        assert self.latents is not None
        index = torch.randint(self.size, (batch,), device=self.row.device)
        return self.latents[index].float(), self.row[index]
