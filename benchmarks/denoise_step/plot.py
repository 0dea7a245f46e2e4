"""Milliseconds per step against the number of GPUs, from the JSON documents of ``benchmarks.denoise_step``.

python -m benchmarks.denoise_step.plot OUT.png RESULTS.json [RESULTS.json ...]
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

SIDES = ("1024", "2048", "512")
STRATEGIES = ("ulysses", "allgather_kv", "ring", "hybrid")
MAKERS = {
    "fast": "ours",
    "blocks": "module, blocks compiled",
    "eager": "module, eager",
    "diffusers-ulysses": "diffusers ulysses, blocks compiled",
    "diffusers-ring": "diffusers ring, blocks compiled",
    "xdit": "xDiT USP, blocks compiled",
    "sglang": "SGLang Diffusion",
    "sglang-blocks": "SGLang Diffusion, blocks compiled",
    "sglang-compiled": "SGLang Diffusion, compiled",
    "vllm-omni": "vLLM-Omni",
    "vllm-omni-eager": "vLLM-Omni, eager",
    "vllm-omni-tensor": "vLLM-Omni, tensor parallel",
}
TICKS_MS = (5, 7, 10, 14, 20, 28, 40, 56, 80, 110, 160, 220, 320, 450, 640, 900)
SKIPPED = frozenset({"none", "batch2", "nccl-low", "nccl-8", "nccl-16", "uncaptured"})
"""Options of ours that are no way to run it; peers always run uncaptured."""
Line = dict[int, float]


def main(out: Path, documents: list[Path]) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    results = [result for path in documents for result in json.loads(path.read_text())["results"] if "case" in result]
    results = [result for result in results if "error" not in result]
    found = {side: lines(results, side) for side in SIDES}
    drawn = {side: some for side, some in found.items() if any(len(line) > 1 for line in some.values())}
    figure, axes = pyplot.subplots(1, len(drawn), figsize=(6 * len(drawn), 4.5), squeeze=False)
    for axis, (side, some) in zip(axes[0], drawn.items(), strict=True):
        draw(axis, side, some)
    figure.tight_layout()
    figure.savefig(out, dpi=80)


def draw(axis: Any, side: str, found: dict[str, Line]) -> None:
    for label, line in sorted(found.items()):
        style = (
            {"linestyle": "--" if "bf16" in label else ":", "color": "black"} if "floor" in label else {"marker": "o"}
        )
        axis.plot(list(line), list(line.values()), label=label, **style)
    axis.set(title=f"FLUX.1-dev {side} x {side}", xlabel="GPUs", ylabel="ms per step", xscale="log", yscale="log")
    axis.minorticks_off()
    everything = [value for line in found.values() for value in line.values()]
    ticks = [tick for tick in TICKS_MS if 0.9 * min(everything) <= tick <= 1.1 * max(everything)]
    axis.set_xticks([1, 2, 4], ["1", "2", "4"])
    axis.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.grid(alpha=0.3)
    axis.legend(fontsize=7)


def lines(results: list[dict[str, Any]], side: str) -> dict[str, Line]:
    """Best time by number of GPUs, per label."""
    found: dict[str, Line] = defaultdict(dict)
    for result in results:
        maker, picture, num_ranks, *options = result["case"].split("/")
        if picture != side or maker not in MAKERS:
            continue
        if maker == "fast" and not SKIPPED.isdisjoint(options):
            continue
        label, number = name_of(maker, options), int(num_ranks.removeprefix("w"))
        found[label][number] = min(result["median_ms"], found[label].get(number, float("inf")))
        if maker == "fast":
            found[f"{options[0]} floor"][number] = result["floor_ms"]
    for label in [label for label in found if label.startswith("ours")]:  # every strategy starts at one rank
        single = found.get(label.split(",")[0], {}).get(1)
        if single is not None:
            found[label][1] = single
    return {label: dict(sorted(line.items())) for label, line in found.items() if line and label not in alone(found)}


def alone(found: dict[str, Line]) -> set[str]:
    """Labels that add nothing: ours at one rank only, where other lines start."""
    return {label for label, line in found.items() if label.startswith("ours") and list(line) == [1]}


def name_of(maker: str, options: list[str]) -> str:
    if maker != "fast":
        return MAKERS[maker]
    strategy = next((option for option in options[1:] if option in STRATEGIES), "")
    memory = "peer memory" if "peer" in options else "NCCL" if strategy else ""
    return ", ".join(part for part in (f"ours {options[0]}", strategy, memory) if part)


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]])
