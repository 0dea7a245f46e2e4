"""What kontext-shapes is trained on: pools of pairs of latents, before and after an edit, and the edits' words."""

import random
from dataclasses import dataclass

import torch
from diffusers import AutoencoderKL
from torch import Tensor
from torch.nn import functional

from training.flux_data import MAIN_SIZE, OTHERS_FROM, PictureDataset, Size, Tokenizers
from training.pool import CaptionedDrawings
from training.shapes.boards import board_drawings
from training.shapes.draw import Chance, Drawings, draw
from training.shapes.edits import Edit, training_edit
from training.shapes.instructions import edit_labels, instruction
from training.shapes.reading import label_rows
from training.shapes.tokens import MAX_LENGTH

LONG_LENGTH = 512  # tokens that diffusers pads a prompt to unless it is told otherwise
LONG_EVERY = 16  # one step in so many has prompts of that length, a quarter of the batch
LONG_SHARE = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Shown:
    """What a step shows: pictures of one size, and prompts padded to one length."""

    size: Size
    num_tokens: int = MAX_LENGTH

    def batch(self, usual: int) -> int:
        """Returns how many edits the step shows."""
        return usual if self.num_tokens == MAX_LENGTH else max(usual // LONG_SHARE, 1)


LONG = Shown(size=MAIN_SIZE, num_tokens=LONG_LENGTH)


@dataclass(frozen=True, kw_only=True, slots=True)
class EditedDrawings:
    """N drawings with instructions as their captions, and the N drawings that these ask for."""

    before: CaptionedDrawings
    after: Drawings


def edited_drawings(edits: list[Edit], rng: random.Random) -> EditedDrawings:
    """Returns the edits' drawings, with instructions in phrasings of training."""
    said = [instruction(edit, rng) for edit in edits]
    before = CaptionedDrawings(
        drawings=board_drawings([edit.before for edit in edits]),
        captions=[one.text for one in said],
        labels=label_rows([edit_labels(one) for one in said]),
    )
    return EditedDrawings(before=before, after=board_drawings([edit.after for edit in edits]))


def training_edits(count: int, seed: int) -> EditedDrawings:
    """Returns edits that training may show."""
    rng = random.Random(seed)
    return edited_drawings([training_edit(rng) for _ in range(count)], rng)


def draw_pair(before: Drawings, after: Drawings, size: Size, generator: torch.Generator | None = None) -> Tensor:
    """Returns pictures (N, 2, 3, height, width) in [-1, 1] that differ by the edit alone."""
    chance = Chance.of(before, generator)
    pair = [draw(one, height=size[0], width=size[1], chance=chance)[:, :, 0] for one in (before, after)]
    return torch.stack(pair, dim=1)


class EditDataset(PictureDataset):
    """Pairs of latents and instructions, all on the device."""

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

    def next_shown(self, progress: float) -> Shown:
        """Returns what the next step shows; now and then it puts new pairs in a pool."""
        size = self.next_size(progress)
        if self.steps % LONG_EVERY == 1 and progress >= OTHERS_FROM:
            return LONG
        return Shown(size=size)

    def words(self, row_B: Tensor, num_tokens: int = MAX_LENGTH) -> tuple[Tensor, Tensor]:
        """Returns the token ids (B, 48) for CLIP and (B, `num_tokens`) for T5."""
        padding = num_tokens - MAX_LENGTH
        t5_ids = functional.pad(self.t5_ids[row_B], (0, padding), value=self.t5_tokenizer.pad_token_id)
        return self.clip_ids[row_B], t5_ids
