"""Two small tokenizers made from captions; both take any text (byte fallback, byte-level pairs)."""

import json
import string
from collections import Counter
from collections.abc import Iterable
from math import log
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from torch import Tensor
from transformers import CLIPTokenizer, PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

MAX_LENGTH = 48
MARKS = ",.:;!?"
_SPECIAL = ("<pad>", "</s>", "<unk>")
_RARE, _BYTE = -14.0, -18.0  # log-probabilities: whole words first, then characters, then bytes


def _pieces(captions: Iterable[str]) -> list[tuple[str, float]]:
    apart = str.maketrans({mark: f" {mark} " for mark in MARKS})
    counts = Counter(word for text in captions for word in text.translate(apart).split())
    total = sum(counts.values())
    marks = [(mark, log(counts.pop(mark, 1) / total)) for mark in MARKS]
    words = [("▁" + word, log(count / total)) for word, count in sorted(counts.items())]
    letters = [(letter, _RARE) for letter in string.printable.strip() if letter not in MARKS]
    return [*marks, *words, ("▁", _RARE), *letters, *((f"<0x{byte:02X}>", _BYTE) for byte in range(256))]


def sentence_pieces(captions: Iterable[str], *, ignore_case: bool = False) -> PreTrainedTokenizerFast:
    """Return a T5-style unigram tokenizer: a piece for every caption word, characters and bytes for everything else.
    Where it ignores case, as CLIP's does, a word has one piece in capitals too.

    It is the generic fast class, because `T5TokenizerFast` rebuilds its tokenizer without byte fallback.
    """
    if ignore_case:
        captions = [text.lower() for text in captions]
    vocabulary = [(token, 0.0) for token in _SPECIAL] + _pieces(captions)
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=_SPECIAL.index("<unk>"), byte_fallback=True))
    if ignore_case:
        tokenizer.normalizer = normalizers.Lowercase()
    space: Any = {"replacement": "▁", "prepend_scheme": "always", "split": True}
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(**space)]
    )
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(**space)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=["$A", "</s>"], pair=["$A", "</s>", "$B", "</s>"], special_tokens=[("</s>", _SPECIAL.index("</s>"))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=MAX_LENGTH
    )


def byte_pairs(captions: Iterable[str], *, num_merges: int = 320) -> CLIPTokenizer:
    """Return CLIP's byte-level byte-pair tokenizer with merges learned from the captions."""
    empty = CLIPTokenizer().backend_tokenizer
    trained = Tokenizer(models.BPE(continuing_subword_prefix="", end_of_word_suffix="</w>"))
    trained.normalizer, trained.pre_tokenizer = empty.normalizer, empty.pre_tokenizer
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<|startoftext|>", "<|endoftext|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=len(special) + 2 * len(alphabet) + num_merges,
        special_tokens=special + alphabet + [letter + "</w>" for letter in alphabet],
        end_of_word_suffix="</w>",
        show_progress=False,
    )
    trained.train_from_iterator(captions, trainer)
    vocabulary = trained.get_vocab()
    merges = json.loads(trained.to_str())["model"]["merges"]
    return CLIPTokenizer(vocab=vocabulary, merges=[tuple(merge) for merge in merges], model_max_length=MAX_LENGTH)


def carried_over(weight_VD: Tensor, old: dict[str, int], new: dict[str, int]) -> Tensor:
    """Return embeddings for another vocabulary: those of the tokens that both have, and for the others random ones of
    the same spread."""
    rows = torch.randn(len(new), weight_VD.shape[1]) * weight_VD.std()
    for token, index in new.items():
        if token in old:
            rows[index] = weight_VD[old[token]]
    return rows


def load_for_tokens(
    encoder: PreTrainedModel, trained: PreTrainedModel, old: PreTrainedTokenizerBase, new: PreTrainedTokenizerBase
) -> None:
    """Put a trained encoder's weights into one for the tokens of another tokenizer, or of the same."""
    embeddings: Any = trained.get_input_embeddings().weight
    rows = carried_over(embeddings, old.get_vocab(), new.get_vocab())
    weights = trained.state_dict()
    copies = [name for name, weight in weights.items() if weight.data_ptr() == embeddings.data_ptr()]
    encoder.load_state_dict(weights | dict.fromkeys(copies, rows))
