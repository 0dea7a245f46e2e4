"""Training data of kontext-shapes: pools of pairs of latents, before and after an edit, and the edits' words."""

import random
from dataclasses import dataclass

import torch
from diffusers import AutoencoderKL
from torch import Tensor

from training.flux_shapes.data import LONG_LENGTH, PictureDataset, Size, Tokenizers
from training.pool import CaptionedDrawings
from training.shapes.boards import board_drawings
from training.shapes.draw import Chance, Drawings, draw
from training.shapes.edits import Edit, training_edit
from training.shapes.instructions import edit_labels, instruction
from training.shapes.reading import label_rows


@dataclass(frozen=True, kw_only=True, slots=True)
class EditedDrawings:
    """N drawings with instructions as their captions, and the N drawings that these ask for."""

    before: CaptionedDrawings
    after: Drawings


def edited_drawings(edits: list[Edit], rng: random.Random) -> EditedDrawings:
    """Return the edits' drawings, with instructions in phrasings of training."""
    said = [instruction(edit, rng) for edit in edits]
    before = CaptionedDrawings(
        drawings=board_drawings([edit.before for edit in edits]),
        captions=[one.text for one in said],
        labels=label_rows([edit_labels(one) for one in said]),
    )
    return EditedDrawings(before=before, after=board_drawings([edit.after for edit in edits]))


def training_edits(count: int, seed: int) -> EditedDrawings:
    """Return edits that training may show."""
    rng = random.Random(seed)
    return edited_drawings([training_edit(rng) for _ in range(count)], rng)


def draw_pair(before: Drawings, after: Drawings, size: Size, generator: torch.Generator | None = None) -> Tensor:
    """Return pictures (N, 2, 3, height, width) in [-1, 1] that differ by the edit alone."""
    chance = Chance.of(before, generator)
    pair = [draw(one, height=size[0], width=size[1], chance=chance)[:, :, 0] for one in (before, after)]
    return torch.stack(pair, dim=1)


class EditDataset(PictureDataset):
    """Pairs of latents and instructions, all on the device."""

    long_every = 16
    long_lengths = (LONG_LENGTH,)

    def __init__(
        self,
        edits: EditedDrawings,
        vae: AutoencoderKL,
        tokenizers: Tokenizers,
        *,
        pool: int,
        chunk: int,
        device: str,
        graph: bool,
    ) -> None:
        self.after = edits.after.to(device)
        super().__init__(edits.before, vae, tokenizers, pool=pool, chunk=chunk, device=device, graph=graph)

    def _latents(self, size: Size, row: Tensor) -> Tensor:
        latents = self._encoded(draw_pair(self.drawings[row], self.after[row], size).flatten(0, 1))
        return latents.view(len(row), 2, *latents.shape[1:])
