"""Per-block compilation traces the exchanges too, makes one graph a kind of block, and answers like eager."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import config as inductor_config
from torch.fx import GraphModule

from engines.core.shard_plan import ShardPlan
from engines.core.tensors import relative_difference
from engines.torch_engine import compiler
from engines.torch_engine import engine as engine_module
from engines.torch_engine.compiler import compile_blocks
from engines.torch_engine.engine import TorchEngine
from tests.engines.support import models
from tests.engines.support.gloo import gang


@pytest.mark.parametrize(("family", "num_kinds", "strategy"), [("flux", 3, "ulysses"), ("wan", 1, "tensor")])
def test_traced_whole_and_equal_to_eager(family: str, num_kinds: int, strategy: str) -> None:
    """FLUX has 3 kinds: the first single-stream block gets its streams apart, the others as views of one tensor."""
    expected = TorchEngine(models.model(family)).predict(models.branches(family, "uneven"), (0,))
    for answer, num_graphs in gang(2).run(predict_compiled, family, strategy):
        assert num_graphs == num_kinds
        assert max(map(relative_difference, answer, expected)) <= 1e-5


def test_more_shapes_than_may_be_compiled_run_uncompiled(caplog: pytest.LogCaptureFixture) -> None:
    plan = ShardPlan(streams=(), blocks=("0",), shards=(), gathers=(), linears=())
    blocks = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
    module = nn.Sequential(blocks)
    several = [torch.randn(length, 3) for length in (2, 4, 5, 2, 6, 4)]
    expected = [[block(x) for block in blocks] for x in several]
    torch._dynamo.reset()
    try:
        with patch.object(torch._dynamo.config, "accumulated_recompile_limit", 2):
            with inductor_config.patch(dynamic_scale_rblock=True):
                compile_blocks(module, plan, backend="eager")
                assert not inductor_config.dynamic_scale_rblock, "processes would choose kernels anew"
            torch._dynamo.utils.counters.clear()
            given = [[block(x) for block in blocks] for x in several]
        torch.testing.assert_close(given, expected)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
        assert [record.levelname for record in caplog.records if record.name == compiler.__name__] == ["WARNING"]
    finally:
        torch.compiler.set_stance("default")
        torch._dynamo.reset()


def test_where_dynamic_shapes_fail_each_shape_is_compiled(caplog: pytest.LogCaptureFixture) -> None:
    def backend(traced: GraphModule, inputs: Sequence[Any]) -> Any:
        if any(isinstance(x, torch.SymInt) for x in inputs):
            raise RuntimeError("no code for symbols")
        return traced

    plan = ShardPlan(streams=(), blocks=("0",), shards=(), gathers=(), linears=())
    module = nn.Sequential(nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)]))
    several = [torch.randn(length, 3) for length in (4, 5)]
    blocks: Any = module[0]
    expected = [[block(x) for block in blocks] for x in several]
    torch._dynamo.reset()
    with patch.object(compiler, "with_rewrites", lambda _: backend):
        compile_blocks(module, plan, dynamic=True)
    torch.testing.assert_close([[block(x) for block in blocks] for x in several], expected)
    assert [record.levelname for record in caplog.records if record.name == compiler.__name__] == ["WARNING"]
    assert "no code for symbols" in caplog.text


def predict_compiled(family: str, strategy: str) -> tuple[tuple[Tensor, ...], int]:
    """Predict with Dynamo's tracing and without Inductor's code generation, which takes 20 s a shape."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    traced = partial(compile_blocks, backend="eager")
    with patch.object(engine_module, "compile_blocks", traced):
        engine = TorchEngine(models.model(family), strategy=strategy, compiled=True)
        answer = engine.predict(models.branches(family, "uneven"), (0, 1))
        engine.predict(models.branches(family, "uneven", seed=6), (0, 1))
    engine.close()
    return answer, torch._dynamo.utils.counters["stats"]["unique_graphs"]
