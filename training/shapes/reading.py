"""Teaches the text encoders to read: beside the pictures' loss, what a scene holds must be told from the tokens.

A small reader asks one question a place (a video: one in all) by attention over the tokens, and answers with a shape, a
colour and so on, separately: an unseen combination of them then reads as well as a seen one. Only training has it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from training.shapes.scenes import BACKGROUNDS, COLOURS, MOTIONS, PLACES, SHAPES, SIZES, Item, MotionScene, Scene

READING_WEIGHT = 0.1
NOT_ASKED = -100  # of the empty prompt
_NOTHING = (0, 0, 0)
_SIDES = {"above": ("top", "bottom"), "left of": ("left", "right")}
STILL_ANSWERS = (len(SHAPES) + 1, len(COLOURS) + 1, len(SIZES) + 1, len(BACKGROUNDS))
MOTION_ANSWERS = (*STILL_ANSWERS, len(MOTIONS))
Labels = list[tuple[int, ...]]


def _item(item: Item) -> tuple[int, int, int]:
    return SHAPES.index(item.shape) + 1, COLOURS.index(item.colour) + 1, SIZES.index(item.size) + 1


def still_labels(scene: Scene) -> Labels:
    """Return for each of `PLACES` the shape, colour and size there (0: nothing) and the background."""
    places = _SIDES[scene.relation] if scene.relation else [item.place for item in scene.items]
    there = {place: _item(item) for place, item in zip(places, scene.items, strict=True)}
    return [(*there.get(place, _NOTHING), BACKGROUNDS.index(scene.background)) for place in PLACES]


def motion_labels(scene: MotionScene) -> Labels:
    """Return one row: shape, colour, size, background, motion."""
    return [(*_item(scene.item), BACKGROUNDS.index(scene.background), MOTIONS.index(scene.motion))]


class Reader(nn.Module):
    """Answers each question with one choice a factor."""

    def __init__(self, dim: int, num_questions: int, answers: Sequence[int]) -> None:
        super().__init__()
        self.choices = tuple(answers)
        self.questions = nn.Parameter(torch.randn(num_questions, dim))
        self.attention = nn.MultiheadAttention(dim, num_heads=4, batch_first=True)
        self.answers = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, sum(answers)))

    def forward(self, tokens_BLD: Tensor) -> list[Tensor]:
        """Return the scores (B, Q, choices) of each factor."""
        questions = self.questions.expand(len(tokens_BLD), -1, -1)
        attended, _ = self.attention(questions, tokens_BLD, tokens_BLD, need_weights=False)
        return list(self.answers(attended).split(self.choices, dim=-1))

    def loss(self, tokens_BLD: Tensor, labels_BQF: Tensor) -> Tensor:
        """Return the mean cross entropy; what a caption leaves unsaid keeps it above zero."""
        scores, labels = self(tokens_BLD), labels_BQF.long().unbind(-1)
        losses = [
            functional.cross_entropy(score.flatten(0, 1), label.flatten(), ignore_index=NOT_ASKED)
            for score, label in zip(scores, labels, strict=True)
        ]
        return torch.stack(losses).mean()


def label_rows(labels: list[Labels]) -> Tensor:
    """Return labels (N + 1, Q, F) as small integers; the row after the last scene's is the empty prompt's."""
    rows = torch.tensor(labels, dtype=torch.int8)
    return torch.cat([rows, torch.full_like(rows[:1], NOT_ASKED)])
