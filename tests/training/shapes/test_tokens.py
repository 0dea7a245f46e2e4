"""Both tokenizers take any text, and one word of a caption is one token."""

import random
from pathlib import Path

import pytest
from transformers import AutoTokenizer, CLIPTokenizer, PreTrainedTokenizerFast

from training.shapes.captions import caption
from training.shapes.scenes import training_scene
from training.shapes.tokens import MAX_LENGTH, byte_pairs, sentence_pieces

ODD = ["", "Ein grünes Dreieck", "红色的圆", "🔴 above 🟦", "tabs\tand\nlines", "<pad> </s>", "x" * 500]


@pytest.fixture(scope="module")
def captions() -> list[str]:
    rng = random.Random(0)
    return [caption(training_scene(rng), rng) for _ in range(3_000)]


def test_a_caption_word_is_one_piece(captions: list[str]) -> None:
    tokenizer = sentence_pieces(captions)
    assert tokenizer.tokenize("a red circle, above.") == ["▁a", "▁red", "▁circle", ",", "▁above", "."]
    assert max(len(ids) for ids in tokenizer(captions)["input_ids"]) < MAX_LENGTH


@pytest.mark.parametrize("text", ODD)
def test_any_text_survives(captions: list[str], text: str) -> None:
    pieces = sentence_pieces(captions)
    assert pieces.unk_token_id not in pieces(text)["input_ids"]
    plain = pieces.decode(pieces(text)["input_ids"], skip_special_tokens=True)
    assert "<" in text or plain.split() == text.split()
    pairs = byte_pairs(captions)
    assert pairs.decode(pairs(text)["input_ids"], skip_special_tokens=True).replace(" ", "") == "".join(
        text.replace("<pad>", "<pad>").lower().split()
    )


def test_saved_tokenizers_load_alike(captions: list[str], tmp_path: Path) -> None:
    pieces, pairs = sentence_pieces(captions), byte_pairs(captions)
    pieces.save_pretrained(tmp_path / "t5")
    pairs.save_pretrained(tmp_path / "clip")
    for text in [*captions[:50], *ODD[1:]]:
        for loader in (AutoTokenizer, PreTrainedTokenizerFast):
            assert loader.from_pretrained(tmp_path / "t5")(text)["input_ids"] == pieces(text)["input_ids"]
        assert CLIPTokenizer.from_pretrained(tmp_path / "clip")(text)["input_ids"] == pairs(text)["input_ids"]
    assert AutoTokenizer.from_pretrained(tmp_path / "t5").model_max_length == MAX_LENGTH
