"""The functions behind ``troupe doctor --tensorrt``."""

from __future__ import annotations

import time
from multiprocessing.connection import Connection

import psutil
import pytest
import torch

from engines.tensorrt_engine.run.doctor import MakeModel, Proof, doctor, on_ranks
from engines.tensorrt_engine.run.runtime import EngineRejectedError
from tests.support.processes import cmdline


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a device")
def test_doctor_without_a_gpu_proves_the_builder_and_names_the_rest() -> None:
    proofs = {proof.subject: proof for proof in doctor({})}
    assert all(proofs[f"{name} builds"].result == "proved" for name in ("all_to_all", "gather", "reduce_scatter"))
    assert [proofs[name].result for name in ("NCCL", "execution", "engine")] == ["not here"] * 3


def answers(rank: int, answer: Connection, num_ranks: int, folder: str, make_model: MakeModel | None) -> None:
    if rank == 0:
        answer.send([Proof(subject=f"{num_ranks} ranks", result="proved", detail="")])


def dies(rank: int, answer: Connection, num_ranks: int, folder: str, make_model: MakeModel | None) -> None:
    """Fail to load the engine on one rank; the others wait for it in a collective."""
    if rank == num_ranks - 1:
        raise EngineRejectedError("out of device memory")
    time.sleep(600)


@pytest.mark.slow
def test_doctor_gets_the_ranks_answer() -> None:
    (proof,) = on_ranks(answers, 1, None)
    assert (proof.subject, proof.result) == ("1 ranks", "proved")


@pytest.mark.slow
def test_doctor_says_what_a_rank_died_of_and_leaves_no_other_waiting() -> None:
    (proof,) = on_ranks(dies, 2, None)
    assert proof.result == "failed"
    assert proof.detail.endswith("EngineRejectedError: out of device memory")
    assert not any("spawn_main" in " ".join(cmdline(one)) for one in psutil.Process().children(recursive=True))
