"""Milliseconds of text encoders and a picture's decoder at full size (random weights): as written, and prepared.

    python -m benchmarks.prepared_stages [PART ...] [--compiled] [--out FILE]

Parts are text encoders (``clip``, ``t5``, ``qwen3``), and decodes with FLUX.1's auto-encoder (``vae-1024``,
``vae-2048``).
"prepared" is what ``compile: true`` does on a GPU: captured encoders, fused decoders. ``--compiled`` adds
``torch.compile``. "start_s" is the time of the first call. "error" is the relative difference to the part as written,
"to_float32" that to the same part in float32. Needs a GPU. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.models.folders import CLIP_LENGTH, ENCODERS, USUAL_LENGTH, diffusers_model
from benchmarks.models.making import default_dtype
from benchmarks.results import status_of, tell
from benchmarks.timing import measure, rank_synchronize
from engines.core.tensors import relative_difference
from pipelines.blocks.captured import CapturedForward
from pipelines.blocks.compilation import make_bias_contiguous
from pipelines.loading import resolve_configuration
from pipelines.vae.fused import fuse_decoder

DEVICE = torch.device("cuda")
LATENT_CHANNELS, PIXELS = 16, 8
SIDES = (1024, 2048)
Call = Callable[[], Tensor]


def encoder(make: Callable[[], Any], length: int, *, compiled: bool) -> Iterator[dict[str, Any]]:
    """Yield the times of an encoder of ``length`` tokens."""
    module = made(make)
    make_bias_contiguous(module)
    options: dict[str, Any] = {"input_ids": torch.randint(0, 100, (1, length), device=DEVICE)}
    if hasattr(module, "lm_head"):  # FLUX.2 and others take hidden states of language models
        mask = torch.ones_like(options["input_ids"])
        options |= {"attention_mask": mask, "output_hidden_states": True, "use_cache": False}
    plain = module.forward
    ways = {"as written": plain, "prepared": CapturedForward(plain, DEVICE)}
    if compiled:
        ways["compiled"] = torch.compile(plain, dynamic=False, mode="reduce-overhead")
    yield from times({name: lambda way=way: last(way(**options)) for name, way in ways.items()}, None)


def decoder(side: int, *, compiled: bool) -> Iterator[dict[str, Any]]:
    """Yield the times of a decode of ``side`` x ``side`` pixels. Those of 1024 are compared with float32."""
    part = made(lambda: diffusers_model(resolve_configuration("FLUX.1-dev"), "vae")).decoder
    latents = torch.randn(1, LATENT_CHANNELS, side // PIXELS, side // PIXELS, device=DEVICE, dtype=torch.bfloat16)
    exact = copy.deepcopy(part).float()(latents.float()) if side == 1024 else None
    ways: dict[str, Callable[..., Tensor]] = {"as written": part, "prepared": fuse_decoder(part)}
    if compiled:
        other = copy.deepcopy(part).to(memory_format=torch.channels_last)
        ways["compiled"] = torch.compile(other.forward, dynamic=False, fullgraph=True)
    yield from times({name: lambda way=way: way(latents) for name, way in ways.items()}, exact)


def times(calls: dict[str, Call], exact: Tensor | None) -> Iterator[dict[str, Any]]:
    expected: Tensor | None = None
    for name, call in calls.items():
        began_s = time.perf_counter()
        result = call().clone()
        rank_synchronize()
        start_s = round(time.perf_counter() - began_s, 2)
        spread = measure(call, repeats=20)
        expected = result if expected is None else expected
        found = {
            "how": name,
            "start_s": start_s,
            "ms": round(spread.median_ms, 2),
            "lowest_ms": round(spread.lowest_ms, 2),
        }
        found |= {"error": relative_difference(result, expected)}
        yield found if exact is None else found | {"to_float32": relative_difference(result, exact)}


def made(make: Callable[[], Any]) -> Any:
    torch.manual_seed(1)
    with DEVICE, default_dtype(torch.bfloat16):
        module: nn.Module = make()
    return module.to(torch.bfloat16).eval()


def last(output: Any) -> Tensor:
    states = getattr(output, "hidden_states", None)
    result: Tensor = output[0] if states is None else states[-1]
    return result


def parts(*, compiled: bool) -> dict[str, Callable[[], Iterator[dict[str, Any]]]]:
    text = {
        "clip": (ENCODERS["FLUX.1-dev"]["text_encoder"], CLIP_LENGTH),
        "t5": (ENCODERS["FLUX.1-dev"]["text_encoder_2"], USUAL_LENGTH),
    }
    text["qwen3"] = (ENCODERS["FLUX.2-klein-4B"]["text_encoder"], USUAL_LENGTH)
    encoders = {name: partial(encoder, *which, compiled=compiled) for name, which in text.items()}
    return {**encoders, **{f"vae-{side}": partial(decoder, side, compiled=compiled) for side in SIDES}}


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help="all by default")
    parser.add_argument("--compiled", action="store_true", help="torch.compile as well: a minute for each part")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    known = parts(compiled=arguments.compiled)
    if unknown := set(arguments.parts) - known.keys():
        parser.error(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(known)}")
    chosen = {name: run for name, run in known.items() if name in arguments.parts or not arguments.parts}
    document: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    tell(document, ({"part": name, **found} for name, run in chosen.items() for found in run()), arguments.out)
    sys.exit(status_of(document["results"]))


if __name__ == "__main__":
    main()
