"""Two small tokenizers made from captions; both take any text (byte fallback, byte-level pairs)."""

import json
import string
from collections import Counter
from collections.abc import Iterable
from math import log
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import CLIPTokenizer, PreTrainedTokenizerFast

MAX_LENGTH = 48
_SPECIAL = ("<pad>", "</s>", "<unk>")
_RARE, _BYTE = -14.0, -18.0  # log-probabilities: whole words first, then characters, then bytes


def _pieces(captions: Iterable[str]) -> list[tuple[str, float]]:
    counts = Counter(word for text in captions for word in text.replace(",", " ,").replace(".", " .").split())
    total = sum(counts.values())
    marks = [(mark, log(counts.pop(mark, 1) / total)) for mark in ",."]
    words = [("▁" + word, log(count / total)) for word, count in sorted(counts.items())]
    letters = [(letter, _RARE) for letter in string.printable.strip() if letter not in ",."]
    return [*marks, *words, ("▁", _RARE), *letters, *((f"<0x{byte:02X}>", _BYTE) for byte in range(256))]


def sentence_pieces(captions: Iterable[str]) -> PreTrainedTokenizerFast:
    """Returns a T5-style unigram tokenizer: a piece for every caption word, characters and bytes for everything else.

    It is the generic fast class, because `T5TokenizerFast` rebuilds its tokenizer without byte fallback.
    """
    vocabulary = [(token, 0.0) for token in _SPECIAL] + _pieces(captions)
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=_SPECIAL.index("<unk>"), byte_fallback=True))
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
    """Returns CLIP's byte-level byte-pair tokenizer with merges learned from the captions."""
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
