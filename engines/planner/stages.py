"""What a request takes beside its steps: prompts that are encoded, latents that are decoded."""

from __future__ import annotations

from engines.planner.machine import Machine

DECODE_SLOWDOWN = 2.0
"""A decode's time as a multiple of what its arithmetic and its memory traffic take one after the other.

Measured on H100s and H200s, this multiple is 1.2 to 3.5: 1.2 for 848x480x121 by HunyuanVideo's auto-encoder, 1.5 for
1024x1024 by Qwen-Image-2.1's, 2.5 for 832x480x81 by Wan's, 3.5 for 2048x2048 by FLUX.1's, uncompiled
(benchmarks/reports/application_h200_2026-11-23.md, application_one_h200_2026-11-24.md, sweep.jsonl).
"""
MANY_ROWS = 2**14
"""Rows of a convolution as a product: the rate is that of large ones."""


def encode_s(machine: Machine, flops: float, moved_bytes: float, num_tokens: int) -> float:
    """Return the seconds of one prompt: products of its tokens, and weights that are read once."""
    return machine.product_s(flops, num_tokens) + moved_bytes / machine.copy_bytes_per_s


def decode_s(machine: Machine, flops: float, moved_bytes: float) -> float:
    """Return the seconds of one decode on one device, within a factor of two."""
    return DECODE_SLOWDOWN * (machine.product_s(flops, MANY_ROWS) + moved_bytes / machine.copy_bytes_per_s)
