"""NCCL groups are made with the right options. NCCL is absent here: fakes replace torch's types for it."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist

from engines.gang.communicator import Communicator
from engines.parallel.mesh import new_group
from engines.parallel.nccl_options import NcclOptions, inherited_options
from tests.engines.support.gloo import gang

UNSET = -1


class Options:
    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self.config = SimpleNamespace(min_ctas=UNSET, max_ctas=UNSET)


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=Options), raising=False)
    return monkeypatch


def values_of(options: Any) -> tuple[bool, int, int]:
    return options.is_high_priority_stream, options.config.min_ctas, options.config.max_ctas


def test_options_as_torch_takes_them(nccl: pytest.MonkeyPatch) -> None:
    assert values_of(NcclOptions().for_torch()) == (True, UNSET, UNSET)
    assert values_of(NcclOptions(high_priority=False, max_ctas=16).for_torch()) == (False, UNSET, 16)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_gangs_group_gets_them_on_gpus_only(nccl: pytest.MonkeyPatch, device: str) -> None:
    made = MagicMock()
    nccl.setattr("engines.gang.communicator.dist.init_process_group", made)
    nccl.setattr(Communicator, "_verify", lambda self: None)
    member = Communicator(rank=0, num_ranks=1, device=torch.device(device), timeout_s=5, nccl=NcclOptions(min_ctas=4))
    member.join(member.open_store("127.0.0.1"))
    given = made.call_args.kwargs["pg_options"]
    assert made.call_args.args == ("nccl" if device == "cuda" else "gloo",)
    assert given is None if device == "cpu" else values_of(given) == (True, 4, UNSET)


@pytest.mark.parametrize(("num_ranks", "is_connected"), [(1, False), (2, True)])
def test_a_single_rank_connects_to_no_others(nccl: pytest.MonkeyPatch, num_ranks: int, is_connected: bool) -> None:
    """With a device, NCCL is set up at once, and then verified."""
    made, verify = MagicMock(), MagicMock()
    nccl.setattr("engines.gang.communicator.dist.init_process_group", made)
    nccl.setattr(Communicator, "_verify", verify)
    device = torch.device("cuda", 0)
    member = Communicator(rank=0, num_ranks=num_ranks, device=device, timeout_s=5)
    member.join(member.open_store("127.0.0.1"))
    assert made.call_args.kwargs["device_id"] == (device if is_connected else None)
    assert verify.called is is_connected


def test_groups_between_some_ranks_inherit_them(nccl: pytest.MonkeyPatch) -> None:
    world = MagicMock()
    world._get_backend.return_value.options = NcclOptions(max_ctas=8).for_torch()
    nccl.setattr(dist, "is_initialized", lambda: True)
    nccl.setattr(dist, "get_backend", lambda: "nccl")
    nccl.setattr(dist.distributed_c10d, "_get_default_group", lambda: world)
    made = MagicMock(return_value=None)
    nccl.setattr(dist, "new_group", made)
    new_group((0, 1), 4)
    assert values_of(made.call_args.kwargs["pg_options"]) == (True, UNSET, 8)


def test_other_libraries_get_none() -> None:
    assert gang(2).run(inherited_options) == [None, None]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_ctas": 65}, "max_ctas is 65; it must be 1 to 64"),
        ({"min_ctas": 0}, "min_ctas is 0; it must be 1 to 64"),
        ({"min_ctas": 8, "max_ctas": 4}, "min_ctas 8 is above max_ctas 4"),
    ],
)
def test_limits_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NcclOptions(**options)


def test_a_replica_that_configures_a_gang_needs_no_torch() -> None:
    code = "import sys, engines.gang.gang_config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
