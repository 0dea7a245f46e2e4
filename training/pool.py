"""Captioned drawings as tensors, and a rolling pool of their latents, so that a step does not wait for the encoder."""

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from training.fast import graphed
from training.shapes.captions import caption, motion_caption
from training.shapes.draw import Drawings, motion_drawings, still_drawings
from training.shapes.reading import label_rows, motion_labels, still_labels
from training.shapes.scenes import training_motion_scene, training_scene
from training.shapes.tokens import MAX_LENGTH
from training.shapes.wording.phrases import free_caption, free_motion_caption

PROMPT_DROPOUT = 0.1
FREE_SHARE = 0.75  # of the captions, that are worded freely


@dataclass(frozen=True, kw_only=True, slots=True)
class CaptionedDrawings:
    """N drawings, their captions, and what a reader should read in these: (N + 1, questions, factors)."""

    drawings: Drawings
    captions: list[str]
    labels: Tensor


def captioned_stills(count: int, seed: int) -> CaptionedDrawings:
    """Return drawings of still scenes that training may show, with captions."""
    rng = random.Random(seed)
    scenes = [training_scene(rng) for _ in range(count)]
    return CaptionedDrawings(
        drawings=still_drawings(scenes),
        captions=[(free_caption if rng.random() < FREE_SHARE else caption)(scene, rng) for scene in scenes],
        labels=label_rows([still_labels(scene) for scene in scenes]),
    )


def captioned_motions(count: int, seed: int) -> CaptionedDrawings:
    """Return drawings of video scenes that training may show, with captions."""
    rng = random.Random(seed)
    scenes = [training_motion_scene(rng) for _ in range(count)]
    return CaptionedDrawings(
        drawings=motion_drawings(scenes),
        captions=[
            (free_motion_caption if rng.random() < FREE_SHARE else motion_caption)(scene, rng) for scene in scenes
        ],
        labels=label_rows([motion_labels(scene) for scene in scenes]),
    )


def token_ids(tokenizer: PreTrainedTokenizerBase, captions: list[str]) -> Tensor:
    """Return token ids (N + 1, 48), padded; the row after the last caption's is the empty prompt's."""
    padded = tokenizer([*captions, ""], padding="max_length", max_length=MAX_LENGTH, truncation=True)
    return torch.tensor(padded["input_ids"], dtype=torch.int16)


def with_dropout(row_B: Tensor, empty: int) -> Tensor:
    """Replace one row in ten by the row of the empty prompt."""
    dropped = torch.rand(row_B.shape, device=row_B.device) < PROMPT_DROPOUT
    return torch.where(dropped, empty, row_B)


class LatentPool:
    """A ring of latents with the rows of their captions; every refresh replaces the oldest by new drawings.

    Everything stays on the device and in place, so that CUDA graphs can refresh the pool and draw from it.
    """

    def __init__(
        self, encode: Callable[[Tensor], Tensor], *, num_rows: int, size: int, chunk: int, device: str, graph: bool
    ) -> None:
        self.encode, self.num_rows = encode, num_rows
        self.size = max(size // chunk, 1) * chunk
        self.slot = torch.arange(chunk, device=device)
        self.row = torch.empty(self.size, dtype=torch.long, device=device)
        first = self._fresh()[1]
        self.latents = torch.empty((self.size, *first.shape[1:]), dtype=torch.bfloat16, device=device)
        self.refresh = graphed(self._refresh, on=graph)
        for _ in range(self.size // chunk):
            self.refresh()

    @torch.no_grad()
    def _fresh(self) -> tuple[Tensor, Tensor]:
        row = torch.randint(self.num_rows, self.slot.shape, device=self.slot.device)
        return row, self.encode(row)

    def _refresh(self) -> Tensor:
        """Draw and encode one chunk; return its place in the pool."""
        row, latents = self._fresh()
        self.latents[self.slot] = latents.bfloat16()
        self.row[self.slot] = row
        return self.slot.add_(len(self.slot)).remainder_(self.size)

    def sample(self, batch: int) -> tuple[Tensor, Tensor]:
        """Return latents (B, ...) in float32 and the rows (B,) of their captions."""
        index = torch.randint(self.size, (batch,), device=self.row.device)
        return self.latents[index].float(), self.row[index]
