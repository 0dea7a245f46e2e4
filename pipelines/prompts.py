"""Token ids of a fixed length from a prompt."""

from __future__ import annotations

import logging
from typing import Any

from torch import Tensor

logger = logging.getLogger(__name__)


def tokenize(tokenizer: Any, prompt: str, num_tokens: int) -> tuple[Tensor, Tensor]:
    """``ids_BT`` and ``mask_BT`` (1 where the prompt is) of one prompt, padded or cut to ``num_tokens``."""
    tokens = tokenizer(prompt, padding="max_length", max_length=num_tokens, truncation=True, return_tensors="pt")
    ids_BT, mask_BT = tokens["input_ids"], tokens["attention_mask"]
    return ids_BT, mask_BT


def warn_if_cut(tokenizer: Any, prompt: str, num_tokens: int) -> None:
    """Log how many tokens of a long prompt the model will not see."""
    num_given = len(tokenizer(prompt)["input_ids"])
    if num_given > num_tokens:
        logger.warning("the prompt has %d tokens; the model sees the first %d", num_given, num_tokens)
