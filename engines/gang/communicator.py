"""The communicator of a gang's ranks: NCCL between GPUs, Gloo between CPUs."""

from __future__ import annotations

import socket
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from engines.gang.gang_config import StoreAddress
from engines.parallel.nccl_options import DEFAULT_OPTIONS, NcclOptions


class Communicator:
    """One rank's membership. ``timeout_s`` is the library's own limit, a last resort behind the gang's deadlines."""

    def __init__(
        self, *, rank: int, num_ranks: int, device: torch.device, timeout_s: float, nccl: NcclOptions = DEFAULT_OPTIONS
    ) -> None:
        self._rank = rank
        self._num_ranks = num_ranks
        self._device = device
        self._timeout = timedelta(seconds=timeout_s)
        self._nccl = nccl
        self._store: Store | None = None

    def open_store(self, host: str) -> StoreAddress:
        """Open the store on rank 0. The kernel picks the port, and the open socket keeps it reserved."""
        assert self._rank == 0
        listener = socket.create_server((host, 0))
        port = listener.getsockname()[1]
        # The store owns the descriptor from here on, and listens on this address only.
        self._store = TCPStore(
            host,
            port,
            self._num_ranks,
            is_master=True,
            wait_for_workers=False,
            timeout=self._timeout,
            master_listen_fd=listener.detach(),
        )
        return StoreAddress(host=host, port=port)

    def join(self, address: StoreAddress) -> None:
        """Initialise ``torch.distributed`` and verify it with one exchange. Block until all ranks have joined.

        A single rank exchanges nothing: NCCL is set up only if it does so later.
        """
        if self._store is None:
            self._store = TCPStore(address.host, address.port, self._num_ranks, timeout=self._timeout)
        is_cuda, is_alone = self._device.type == "cuda", self._num_ranks == 1
        dist.init_process_group(
            "nccl" if is_cuda else "gloo",
            store=self._store,
            rank=self._rank,
            world_size=self._num_ranks,
            timeout=self._timeout,
            device_id=self._device if is_cuda and not is_alone else None,  # None: not before the first exchange
            pg_options=self._nccl.for_torch() if is_cuda else None,
        )
        if not is_alone:
            self._verify()

    def leave(self) -> None:
        """Destroy the process group; all ranks do it together. The store lives as long as rank 0's process."""
        dist.destroy_process_group()

    def _verify(self) -> None:
        total = torch.tensor([self._rank + 1], device=self._device)
        dist.all_reduce(total)
        expected = self._num_ranks * (self._num_ranks + 1) // 2
        assert total.item() == expected, f"the first exchange gave {total.item()}, expected {expected}"
