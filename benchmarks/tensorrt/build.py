"""Time, memory and size of exports and builds: `python -m benchmarks.tensorrt.build --models FLUX.1-dev --ranks 4`.

What `troupe build-engine` does, each case in a process of its own with an empty cache. No GPU is needed. Published
models go by their configurations: their weights exist nowhere. A case that TensorRT cannot do is listed with the
reason. The last line of output is one JSON document.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from engines.core.spec import is_static
from engines.tensorrt_engine.build.report import EngineReport

MIB, GIB_IN_KIB = 1 << 20, 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One call of `build-engine`. ``flag`` is none, weight_streaming or strip_weights."""

    model: str
    strategy: str
    num_ranks: int
    target: str
    precision: str
    weights: str
    flag: str


def measure(case: Case) -> dict[str, Any]:
    import torch

    from deployments.cli.build import EngineBuildOptions, engine_reports

    torch.set_num_threads(1)
    options: dict[str, Any] = {name: value for name, value in asdict(case).items() if name != "flag"}
    options |= {"calibrate": is_static(case.precision)} | ({} if case.flag == "none" else {case.flag: True})
    with tempfile.TemporaryDirectory() as folder:
        order = EngineBuildOptions(**options, cache_dir=Path(folder))
        started_s = time.process_time()
        reports = engine_reports(order, visible=False)
    return (
        asdict(case)
        | whole(reports)
        | {
            "cpu_s": round(time.process_time() - started_s, 1),
            "peak_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / GIB_IN_KIB, 2),
        }
    )


def whole(reports: Sequence[EngineReport]) -> dict[str, Any]:
    """Returns what one engine holds; of one in segments the sum over the kinds of them."""
    exchanges = Counter[str]()
    for report in reports:
        exchanges.update(report.collectives)
    return {
        "files": len(reports),
        "export_s": round(reports[0].export_s, 1),
        "build_s": round(sum(report.build_s for report in reports), 1),
        "graph_mib": round(sum(report.graph_bytes for report in reports) / MIB, 2),
        "engine_mib": round(sum(report.engine_bytes for report in reports) / MIB, 2),
        "collectives": dict(exchanges),
        "attentions": sum(report.num_attentions for report in reports),
        "fused_attentions": sum(report.num_fused_attentions or 0 for report in reports),
    }


def in_own_process(case: Case) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.tensorrt.build", "--one", json.dumps(asdict(case))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        return asdict(case) | {"error": reason.partition("Error: ")[2] or reason}
    measured: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return measured


COLUMNS = (
    "model", "division", "precision, target, weights", "export s", "build s", "CPU s", "peak GiB", "graph MiB",
    "engine MiB", "collectives", "fused attentions",
)  # fmt: skip


def shown(row: dict[str, Any]) -> str:
    flag = "" if row["flag"] == "none" else f", {row['flag']}"
    options = f"{row['precision']}, {row['target']}, {row['weights']}{flag}"
    start = f"| {row['model']} | {row['strategy']} {row['num_ranks']} | {options} |"
    if "error" in row:
        return f"{start} refused: {row['error']} |"
    exchanges = ", ".join(f"{number} {name}" for name, number in sorted(row["collectives"].items())) or "none"
    files = "" if row["files"] == 1 else f" in {row['files']} files"
    sizes = f"{row['peak_gib']} | {row['graph_mib']} | {row['engine_mib']}{files}"
    fused = f"{row['fused_attentions']} of {row['attentions']}"
    return f"{start} {row['export_s']} | {row['build_s']} | {row['cpu_s']} | {sizes} | {exchanges} | {fused} |"


def cases(options: argparse.Namespace) -> Iterator[Case]:
    every = itertools.product(
        options.models,
        options.strategies,
        options.ranks,
        options.targets,
        options.precisions,
        options.weights,
        options.flags,
    )
    for model, strategy, num_ranks, target, precision, weights, flag in every:
        if (strategy, num_ranks) != ("hybrid", 2):  # two ranks have one axis
            yield Case(
                model=model,
                strategy=strategy,
                num_ranks=num_ranks,
                target=target,
                precision=precision,
                weights=weights,
                flag=flag,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["flux-shapes", "wan-shapes"])
    parser.add_argument("--strategies", nargs="+", default=["ulysses", "allgather_kv", "hybrid", "tensor", "ring"])
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4, 8])
    parser.add_argument("--targets", nargs="+", default=["sm89"])
    parser.add_argument("--precisions", nargs="+", default=["native"])
    parser.add_argument("--weights", nargs="+", default=["inputs"], choices=["inputs", "constants"])
    parser.add_argument("--flags", nargs="+", default=["none"], choices=["none", "weight_streaming", "strip_weights"])
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(Case(**json.loads(options.one)))))
        return
    print(f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|")
    rows = []
    for case in cases(options):
        rows.append(in_own_process(case))
        print(shown(rows[-1]), flush=True)
    print(json.dumps({"hardware": hardware(), "versions": versions(), "rows": rows}))


def hardware() -> dict[str, Any]:
    return {"machine": platform.machine(), "cores": os.cpu_count(), "load": os.getloadavg()[0]}


def versions() -> dict[str, str]:
    from engines.tensorrt_engine.build.bindings import load_bindings

    bindings = load_bindings()
    packages = {name: version(name) for name in ("torch", "diffusers", "onnx", "onnxscript", "onnxruntime")}
    return {**packages, bindings.product: bindings.version, "python": platform.python_version()}


if __name__ == "__main__":
    main()
