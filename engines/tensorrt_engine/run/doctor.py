"""``troupe doctor --tensorrt``: run the proofs that this host allows, and list the others.

A host with TensorRT 11 and GPUs allows all. Each collective runs over NCCL and is compared with its reference. The
model's engine on teams of each size is compared with one rank and with torch. Without a GPU, only builds are checked.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
import torch.distributed as dist
from onnx import TensorProto, helper

from engines.core.engine import RankContext
from engines.core.model import DenoiserModel
from engines.planner.measure import Body, local_ranks
from engines.tensorrt_engine.build.bindings import Target, TensorRTMissingError, load_bindings
from engines.tensorrt_engine.build.builder import BuildError, BuildOptions, build
from engines.tensorrt_engine.export.collectives import (
    DOMAIN,
    OPSET,
    REDUCING,
    ROOTED,
    Collective,
    Operation,
    collective_node,
)
from engines.tensorrt_engine.run import nccl
from engines.tensorrt_engine.run.runtime import EngineRunner, LoadedEngine, communicator, current_target

Result = Literal["proved", "failed", "not here"]
MakeModel = Callable[[str], DenoiserModel]
"""``make_model(device)``: picklable, since every rank makes its own model."""

ROWS, COLUMNS = 8, 16
START_TIMEOUT_S, LEAVE_S = 900.0, 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Proof:
    """One statement of the table in docs/reference/tensorrt.md, and its result on this host."""

    subject: str
    """Subject of the statement, such as the operation."""
    result: Result
    """True if it holds here; "not here": this host lacks what it needs."""
    detail: str
    """Version, device, or why it failed."""


def doctor(environment: Mapping[str, str], make_model: MakeModel | None = None) -> list[Proof]:
    """Return every proof that this host allows; a failure is a failed proof, not an exception.

    Starts one process per GPU. ``environment`` holds this process's variables.
    """
    try:
        bindings = load_bindings()
    except TensorRTMissingError as error:
        return [Proof(subject="TensorRT", result="failed", detail=str(error))]
    proofs = [Proof(subject="TensorRT", result="proved", detail=f"{bindings.product} {bindings.version}")]
    target = _target()
    proofs += [_prove_build(operation, target) for operation in get_args(Operation)]
    if not torch.cuda.is_available():
        missing = "no GPU on this host"
        return [
            *proofs,
            *(Proof(subject=s, result="not here", detail=missing) for s in ("NCCL", "execution", "engine")),
        ]
    proofs.append(_prove_nccl_names(environment))
    return proofs + _prove_on_gpus(environment, make_model)


def _target() -> Target:
    return current_target(0) if torch.cuda.is_available() else Target.parse("sm89")


def one_collective(operation: Operation, num_ranks: int) -> tuple[Collective, bytes]:
    """Return a collective, and the ONNX file of a network that runs it on float32."""
    reduction: Any = "sum" if operation in REDUCING else "none"
    root = 0 if operation in ROOTED else -1
    collective = Collective(operation=operation, num_ranks=num_ranks, reduction=reduction, root=root)
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, (ROWS * num_ranks, COLUMNS))
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    graph = helper.make_graph([collective_node(collective, "x", "y")], operation, [x], [y])
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, 1)]
    return collective, bytes(helper.make_model(graph, opset_imports=opsets).SerializeToString())


def _prove_build(operation: Operation, target: Target) -> Proof:
    subject = f"{operation} builds"
    try:
        build(one_collective(operation, 2)[1], BuildOptions(target=target))
    except (BuildError, ValueError) as error:
        return Proof(subject=subject, result="failed", detail=str(error))
    return Proof(subject=subject, result="proved", detail=target.name)


def _prove_nccl_names(environment: Mapping[str, str]) -> Proof:
    libraries = nccl.search(nccl.library_path(environment))
    missing = [name for name in (nccl.VERSIONED, nccl.PLAIN) if name not in libraries]
    if missing:
        detail = f"{', '.join(missing)} not on LD_LIBRARY_PATH; ranks are started with a folder of links"
        return Proof(subject="NCCL names", result="failed", detail=detail)
    return Proof(subject="NCCL names", result="proved", detail=", ".join(map(str, libraries.values())))


def _prove_on_gpus(environment: Mapping[str, str], make_model: MakeModel | None) -> list[Proof]:
    """Start one process per GPU, in an environment where TensorRT finds torch's NCCL."""
    os.environ.update(nccl.rank_environment(environment))
    return on_ranks(_rank, torch.cuda.device_count(), make_model)


def on_ranks(body: Body, num_ranks: int, make_model: MakeModel | None) -> list[Proof]:
    """Return the proofs of rank 0, or one failed proof after a rank's death or a timeout."""
    with (
        tempfile.TemporaryDirectory() as folder,
        local_ranks(body, num_ranks, (num_ranks, folder, make_model)) as ranks,
    ):
        try:
            proofs: list[Proof] = ranks.answer(START_TIMEOUT_S)
            ranks.leave(LEAVE_S)
            return proofs
        except (RuntimeError, TimeoutError) as error:
            return [Proof(subject="execution", result="failed", detail=str(error))]


def _rank(rank: int, answer: Connection, num_ranks: int, folder: str, make_model: MakeModel | None) -> None:
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    rendezvous = f"file://{Path(folder) / 'store'}"
    dist.init_process_group("nccl", init_method=rendezvous, rank=rank, world_size=num_ranks, device_id=device)
    dist.all_reduce(torch.zeros(1, device=device))
    proofs = [_prove_execution(operation, rank, num_ranks, device) for operation in get_args(Operation)]
    if make_model is not None:
        proofs.append(_prove_engine(make_model, rank, num_ranks, device))
    if rank == 0:
        answer.send(proofs)
    dist.barrier()
    dist.destroy_process_group()


def _prove_execution(operation: Operation, rank: int, num_ranks: int, device: torch.device) -> Proof:
    collective, network = one_collective(operation, num_ranks)
    inputs = [
        np.random.default_rng(r).standard_normal((ROWS * num_ranks, COLUMNS), np.float32) for r in range(num_ranks)
    ]
    assert dist.group.WORLD is not None
    pointer = communicator(str(dist.group.WORLD.group_name), device)
    engine_file = build(network, BuildOptions(target=current_target(rank))).engine_file
    runner = EngineRunner(LoadedEngine(engine_file), {}, communicator=pointer)
    output = runner.run({"x": torch.from_numpy(inputs[rank]).to(device)})["y"].cpu().numpy()
    runner.close()
    expected = collective.apply(inputs)[rank]
    wrong = int(not np.allclose(output, expected, rtol=1e-5, atol=1e-5)) if not np.isnan(expected).any() else 0
    total = torch.tensor(wrong, device=device)
    dist.all_reduce(total)
    detail = f"{num_ranks} ranks" if not total else f"{int(total)} of {num_ranks} ranks differ from torch.distributed"
    return Proof(subject=f"{operation} executes", result="failed" if total else "proved", detail=detail)


def _prove_engine(make_model: MakeModel, rank: int, num_ranks: int, device: torch.device) -> Proof:
    """Run the gang's self-check (every team against one rank), then compare one rank with torch."""
    from engines.core.tensors import relative_difference
    from engines.parallel.self_check import TOLERANCE
    from engines.tensorrt_engine.load import load_tensorrt_engine

    model = make_model(str(device))
    try:
        context = RankContext(rank=rank, num_ranks=num_ranks, device=str(device))
        engine = load_tensorrt_engine(model, context)
        branch = model.probe()[0]
        prediction = engine.predict((branch,), (rank,))[0]
        with torch.no_grad():
            expected = model.forward(model.modules[branch.module], branch.arguments)
        engine.close()
    except (RuntimeError, ValueError) as error:
        return Proof(subject="engine", result="failed", detail=f"rank {rank}: {error}")
    difference = relative_difference(prediction, expected)
    ok = difference <= TOLERANCE.get(prediction.dtype, 1e-4)
    detail = f"every team of {num_ranks} ranks agrees with one; one with torch to {difference:.1e}"
    return Proof(subject="engine", result="proved" if ok else "failed", detail=detail)
