"""Gloo ranks for tests: processes forked from one server that has imported torch, and reused for many calls.

Rank r of a gang runs ``function(*args)`` when the test calls ``gang.run(function, *args)``; functions and arguments are
pickled (by value: torch's sharing of tensors between processes is not used), so functions live at the top of a module.
"""

from __future__ import annotations

import atexit
import gc
import multiprocessing as mp
import pickle
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from tests.support.patience import PATIENCE_S

PRELOAD = ["torch", "torch.distributed", "diffusers.models.transformers.transformer_flux"]
PRELOAD += ["diffusers.models.transformers.transformer_wan", "tests.engines.support.models"]
PRELOAD += ["pipelines.blocks.encoder", "pipelines.blocks.sampler", "diffusers.pipelines.auto_pipeline"]
PRELOAD += ["engines.torch_engine.engine", "pytest"]
"""Modules shared by all ranks; each rank would otherwise import them for seconds."""
NO_ANSWER = (False, "no answer")


class Gang:
    def __init__(self, num_ranks: int) -> None:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        self._store = store
        pairs = [context.Pipe() for _ in range(num_ranks)]
        self._pipes = [ours for ours, _ in pairs]
        self._ranks = [
            context.Process(target=_serve, args=(theirs, rank, num_ranks, self._store.port), daemon=True)
            for rank, (_, theirs) in enumerate(pairs)
        ]
        for process in self._ranks:
            process.start()

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Return the results in rank order. Raise an exception of any rank here, with its traceback as text."""
        for pipe in self._pipes:
            pipe.send_bytes(pickle.dumps((function, args)))
        answers = [pickle.loads(pipe.recv_bytes()) if pipe.poll(PATIENCE_S) else NO_ANSWER for pipe in self._pipes]
        if NO_ANSWER in answers:
            self.close()  # the answer may come later, when another test waits for its own
            gang.cache_clear()
        failed = [f"rank {rank}: {answer}" for rank, (ok, answer) in enumerate(answers) if not ok]
        if failed:
            raise RuntimeError("\n".join(failed))
        return [answer for _, answer in answers]

    def close(self) -> None:
        for process in self._ranks:
            process.kill()
        for process in self._ranks:
            process.join()


@cache
def gang(num_ranks: int) -> Gang:
    """Return the one gang of this size for the whole test run."""
    made = Gang(num_ranks)
    atexit.register(made.close)
    return made


def _serve(pipe: Connection, rank: int, num_ranks: int, port: int) -> None:
    gc.freeze()  # preloaded objects stay: a garbage collection would copy their pages, too
    gc.set_threshold(20_000)  # the value of the tests' own process
    torch.set_num_threads(1)
    patience = timedelta(seconds=PATIENCE_S)
    store = dist.TCPStore("127.0.0.1", port, num_ranks, timeout=patience)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=patience)
    while True:
        try:
            function, args = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        pipe.send_bytes(pickle.dumps(_answer(function, args)))


def _answer(function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[bool, Any]:
    try:
        return True, function(*args)
    except Exception:
        return False, traceback.format_exc()
