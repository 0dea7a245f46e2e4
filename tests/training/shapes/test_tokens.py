"""Both tokenizers accept any text, and one word of a caption is one token."""

import random
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, CLIPTokenizer, PreTrainedTokenizerFast

from training.flux_shapes.model import build_t5
from training.shapes.captions import caption
from training.shapes.scenes import training_scene
from training.shapes.tokens import MAX_LENGTH, byte_pairs, load_for_tokens, sentence_pieces

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


def test_pieces_that_ignore_case_take_any_text_in_lower_case(captions: list[str], tmp_path: Path) -> None:
    pieces = sentence_pieces(captions, ignore_case=True)
    pieces.save_pretrained(tmp_path)
    for text in [*captions[:50], *ODD]:
        ids = pieces(text)["input_ids"]
        assert pieces.unk_token_id not in ids
        assert ids == pieces(text.upper())["input_ids"] or "ü" in text or "<" in text
        assert AutoTokenizer.from_pretrained(tmp_path)(text)["input_ids"] == ids
        plain = pieces.decode(ids, skip_special_tokens=True)
        assert "<" in text or plain.split() == text.lower().split()


def test_tokens_of_both_vocabularies_keep_their_embeddings(captions: list[str]) -> None:
    old, new = sentence_pieces(captions[:20]), sentence_pieces([*captions, "a vermilion circle"])
    trained, encoder = build_t5(old), build_t5(new)
    load_for_tokens(encoder, trained, old, new)
    short, long = old("a red circle", return_tensors="pt"), new("a red circle", return_tensors="pt")
    assert not torch.equal(short["input_ids"], long["input_ids"])
    torch.testing.assert_close(encoder(**long).last_hidden_state, trained(**short).last_hidden_state)
    assert "▁vermilion" in new.get_vocab()
    load_for_tokens(trained, trained, old, old)
    torch.testing.assert_close(encoder(**long).last_hidden_state, trained(**short).last_hidden_state)
