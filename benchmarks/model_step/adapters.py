"""What it costs to change adapters between two steps, beside a step: a published model, all linears of its plan.

    python -m benchmarks.model_step.adapters [MODEL] [--ranks-of-adapters 16 64] [--precision fp8]

Every second step asks for another adapter, so each of these writes all weights that an adapter touches anew. The last
line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import cycle
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.models.published import PublishedModel
from benchmarks.timing import measure
from engines.core.model import LowRank, Mix
from engines.torch_engine.engine import TorchEngine
from pipelines.size import Size

ALONE = (0,)


def main() -> None:
    arguments = parse()
    device = torch.device("cuda", 0)
    hardware = torch.cuda.get_device_name(device)
    document: dict[str, Any] = {"hardware": hardware, "torch": torch.__version__, "model": arguments.model}
    document |= {"precision": arguments.precision, "results": []}
    make = partial(PublishedModel.made, arguments.model, device, torch.bfloat16, arguments.size, arguments.tokens)
    for rank in arguments.ranks:  # what an engine has quantised no other one can take
        document["results"].append(result_of(make(), rank, arguments.precision))
    print(json.dumps(document))


@torch.no_grad()
def result_of(model: PublishedModel, rank: int, precision: str) -> dict[str, Any]:
    """Milliseconds of a step, of a step that changes the adapter, and of one that goes back to none."""
    ranks = dict(low_ranks(model.module, rank))
    additions = {name: {model.branch.module: ranks} for name in ("first", "second")}
    engine = TorchEngine(replace(model.denoiser(), additions=additions), precision=precision)
    engine.warm_up((model.branch,), ALONE)
    first, second = (("first", 0.8),), (("second", 0.8),)
    orders: dict[str, tuple[Mix, ...]] = {"step": ((),), "to another": (first, second), "to none and back": ((), first)}
    times = {name: _median_ms(steps(engine, model, mixes)) for name, mixes in orders.items()}
    engine.close()
    torch.cuda.empty_cache()
    return {"rank": rank, "num_weights": len(ranks), "ms": times}


def steps(engine: TorchEngine, model: PublishedModel, mixes: tuple[Mix, ...]) -> Callable[[], tuple[Tensor, ...]]:
    turns = cycle(mixes)
    return lambda: engine.predict((replace(model.branch, additions=next(turns)),), ALONE)


def low_ranks(module: nn.Module, rank: int) -> Iterator[tuple[str, LowRank]]:
    """Yields an adapter of every linear layer's weight, but for the small ones outside the blocks."""
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Linear) and "blocks" in name:
            draw: Any = {"device": layer.weight.device, "dtype": layer.weight.dtype}
            up_NR = 0.01 * torch.randn(layer.out_features, rank, **draw)
            yield f"{name}.weight", LowRank(up_NR=up_NR, down_RK=torch.randn(rank, layer.in_features, **draw))


def _median_ms(step: Callable[[], object]) -> float:
    return round(measure(step, repeats=20).median_ms, 2)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="FLUX.1-dev")
    parser.add_argument("--ranks-of-adapters", dest="ranks", nargs="+", type=int, default=(16, 64))
    parser.add_argument("--precision", default="native")
    parser.add_argument("--size", type=Size.parse, help="of the picture")
    parser.add_argument("--tokens", type=int, help="of the prompt")
    return parser.parse_args()


if __name__ == "__main__":
    main()
