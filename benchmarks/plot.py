"""Milliseconds per step against width, from the JSON documents of ``benchmarks.denoise_step``.

python -m benchmarks.plot OUT.png RESULTS.json [RESULTS.json ...]
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

SIDES = ("1024", "2048")
Line = dict[int, float]


def main(out: Path, documents: list[Path]) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    results = [
        result for path in documents for result in json.loads(path.read_text())["results"] if "error" not in result
    ]
    figure, axes = pyplot.subplots(1, len(SIDES), figsize=(11, 4.5))
    for axis, side in zip(axes, SIDES, strict=True):
        for label, line in sorted(lines(results, side).items()):
            style = {"linestyle": "--", "color": "black"} if "floor" in label else {"marker": "o"}
            axis.plot(list(line), list(line.values()), label=label, **style)
        axis.set(
            title=f"FLUX.1-dev {side} x {side}", xlabel="width (GPUs)", xscale="log", yscale="log", xticks=[1, 2, 4]
        )
        axis.set_xticklabels(["1", "2", "4"])
        axis.minorticks_off()
        axis.set_ylabel("ms per step")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(out, dpi=80)


def lines(results: list[dict[str, Any]], side: str) -> dict[str, Line]:
    """Best time by width, per label."""
    found: dict[str, Line] = defaultdict(dict)
    for result in results:
        maker, picture, width, *options = result["case"].split("/")
        if picture != side or "none" in options or any(option.startswith("batch") for option in options):
            continue
        label = name_of(maker, options)
        number = int(width.removeprefix("w"))
        found[label][number] = min(result["median_ms"], found[label].get(number, float("inf")))
        if maker == "fast":
            found[f"{options[0]} floor"][number] = result["floor_ms"]
    for label in [label for label in found if label.startswith("ours")]:  # every strategy starts at one rank
        single = found.get(label.split(",")[0], {}).get(1)
        if single is not None:
            found[label][1] = single
    return {label: dict(sorted(line.items())) for label, line in found.items()}


def name_of(maker: str, options: list[str]) -> str:
    if maker != "fast":
        return f"{maker}, blocks compiled" if maker.startswith("diffusers") else f"module, {maker}"
    strategy = next((option for option in options[1:] if option in ("allgather_kv", "ring", "hybrid")), "")
    return f"ours {options[0]}" + (f", {strategy}" if strategy else "")


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]])
