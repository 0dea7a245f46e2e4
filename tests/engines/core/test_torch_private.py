"""Each private name of PyTorch in use exists in the installed version; a failure means that an upgrade changed it."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import sympy  # type: ignore[import-untyped]
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.nn import functional

from engines.core import torch_private
from engines.core.torch_private import (
    COLLECTIVE_PREFIX,
    ONNX_REGISTRATION_LOGGER,
    TorchDispatchMode,
    addmm_activation,
    clear_forward_hooks,
    collective_ops,
    compile_backend,
    compile_error,
    cpu_attention,
    cudnn_attention,
    default_nccl_options,
    efficient_attention,
    end_failed_capture,
    fake_mode,
    fake_mode_of,
    fake_store,
    flash_attention,
    floor_divisions,
    has_persistent_buffer,
    int_mm,
    is_operator,
    keep_kernel_choices,
    load_compiled,
    mark_static,
    nccl_communicator,
    process_group,
    raise_recompile_limit,
    recompile_limit_error,
    scaled_mm,
    separate_sizes,
    symmetric_memory,
    tree_leaves,
    tree_map_only,
    version_of,
    without_modes,
)

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def fake_gang() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=4, store=fake_store())
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_products_of_int8() -> None:
    a, b = (torch.randint(-128, 128, (32, 32), dtype=torch.int8) for _ in range(2))
    assert torch.equal(int_mm(a, b).long(), a.long() @ b.long())


def test_products_of_float8() -> None:
    a, b = (torch.randn(16, 16).to(torch.float8_e4m3fn) for _ in range(2))
    scales = {"scale_a": torch.tensor(0.5), "scale_b": torch.tensor(2.0)}
    product = scaled_mm(a, b.t(), out_dtype=torch.bfloat16, use_fast_accum=True, **scales)
    torch.testing.assert_close(product, (a.float() @ b.t().float()).bfloat16(), rtol=0.02, atol=0.02)


def test_a_product_with_gelu() -> None:
    bias, x, weight = torch.randn(8), torch.randn(4, 6), torch.randn(8, 6)
    expected = functional.gelu(functional.linear(x, weight, bias))
    torch.testing.assert_close(addmm_activation(bias, x, weight.t(), use_gelu=True), expected)


def assert_attends(attention: Callable[..., Any], *more: Any, device: str, dtype: torch.dtype) -> None:
    q, k, v = torch.randn(3, 1, 2, 8, 16, device=device, dtype=dtype)
    out, lse, *_ = attention(q, k, v, *more)
    torch.testing.assert_close(out, functional.scaled_dot_product_attention(q, k, v), rtol=0.02, atol=0.02)
    expected = (q.float() @ k.float().mT / 4).logsumexp(-1)
    torch.testing.assert_close(lse.float().reshape(1, 2, -1)[..., :8], expected, rtol=0.02, atol=0.02)


def test_attention_of_the_cpu() -> None:
    assert_attends(cpu_attention, device="cpu", dtype=torch.float32)


@pytest.mark.gpu
@NEEDS_GPU
def test_attention_of_gpus() -> None:
    assert_attends(cudnn_attention, None, True, device="cuda", dtype=torch.bfloat16)
    assert_attends(flash_attention, device="cuda", dtype=torch.bfloat16)
    assert_attends(efficient_attention, None, True, device="cuda", dtype=torch.float32)


def test_attention_of_gpus_has_the_arguments_that_are_given() -> None:
    names = {
        cudnn_attention: ["query", "key", "value", "attn_bias", "compute_log_sumexp"],
        flash_attention: ["query", "key", "value"],
        efficient_attention: ["query", "key", "value", "attn_bias", "compute_log_sumexp"],
    }
    for operator, expected in names.items():
        arguments = operator.default._schema.arguments
        assert [one.name for one in arguments][: len(expected)] == expected
        assert all(one.has_default_value() for one in arguments[len(expected) :])


def test_collectives_are_operators_that_enter_a_graph_by_name(fake_gang: None) -> None:
    assert dist.group.WORLD is not None
    name = dist.group.WORLD.group_name
    x = torch.ones(4, 2)
    wait = collective_ops.wait_tensor
    assert wait(collective_ops.all_to_all_single(x, [1] * 4, [1] * 4, name)).shape == (4, 2)
    assert wait(collective_ops.all_gather_into_tensor(x, 4, name)).shape == (16, 2)
    assert wait(collective_ops.all_reduce(x, "sum", name)).shape == (4, 2)
    assert wait(collective_ops.reduce_scatter_tensor(x, "sum", 4, name)).shape == (1, 2)
    assert wait(collective_ops.broadcast(x, 0, name)).shape == (4, 2)
    assert str(collective_ops.broadcast.default).startswith(COLLECTIVE_PREFIX.replace("::", "."))
    assert collective_ops.broadcast.default.name().startswith(COLLECTIVE_PREFIX)


def test_a_group_is_found_by_its_name(fake_gang: None) -> None:
    assert dist.group.WORLD is not None
    group = process_group(dist.group.WORLD.group_name)
    assert group.size() == 4


@pytest.mark.gpu
@NEEDS_GPU
def test_a_group_of_nccl_has_options_and_a_communicator() -> None:
    torch.cuda.set_device(0)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    try:
        dist.all_reduce(torch.ones(1, device="cuda"))
        assert dist.group.WORLD is not None
        assert nccl_communicator(dist.group.WORLD, torch.device("cuda", 0)) > 0
        assert default_nccl_options().is_high_priority_stream is False
    finally:
        dist.destroy_process_group()


def test_memory_between_gpus_is_asked_for_by_these_arguments() -> None:
    symmetric = symmetric_memory()
    assert {"dtype", "device"} <= inspect.signature(symmetric.empty).parameters.keys()
    assert list(inspect.signature(symmetric.rendezvous).parameters)[:2] == ["tensor", "group"]


def test_a_change_in_place_is_seen() -> None:
    x = torch.zeros(2)
    before = version_of(x)
    x.add_(1)
    assert version_of(x) > before


def test_more_versions_are_compiled_until_there_are_too_many() -> None:
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=1):
        compiled = torch.compile(lambda x: x + 1, dynamic=False, fullgraph=True, backend="eager")
        compiled(torch.zeros(1))
        with pytest.raises(recompile_limit_error()):
            compiled(torch.zeros(2))
        raise_recompile_limit(3)
        assert compiled(torch.zeros(2)).tolist() == [1, 1]
        raise_recompile_limit(2)
        assert compiled(torch.zeros(3)).tolist() == [1, 1, 1]
    torch._dynamo.reset()


def test_what_cannot_be_compiled_is_an_error_before_it_runs() -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError("no code")

    with pytest.raises(compile_error(), match="no code"):
        torch.compile(lambda x: x + 1, backend=fails)(torch.zeros(1))


def test_code_for_two_equal_sizes_serves_different_ones() -> None:
    num_compiled = []
    for context in (nullcontext(), separate_sizes()):
        torch._dynamo.reset()
        graphs: list[Any] = []

        def backend(graph: Any, inputs: Any, graphs: list[Any] = graphs) -> Any:
            graphs.append(graph)
            return graph.forward

        compiled = torch.compile(lambda x, y: (x + 1, y + 1), dynamic=True, backend=backend)
        with context:
            compiled(torch.zeros(4), torch.zeros(4))
            compiled(torch.zeros(4), torch.zeros(5))
        num_compiled.append(len(graphs))
    assert num_compiled == [2, 1]
    torch._dynamo.reset()


def test_a_static_dim_has_no_symbol() -> None:
    symbols: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        symbols.append(sum(isinstance(x, torch.SymInt) for x in inputs))
        return graph.forward

    compiled = torch.compile(lambda x: x + 1, dynamic=True, backend=backend)
    for length in (4, 5):
        x = torch.zeros(length, 7)
        mark_static(x, 1)
        assert compiled(x).sum() == 7 * length
    assert symbols == [1]
    torch._dynamo.reset()


def test_inductor_has_the_choice_that_it_does_not_keep() -> None:
    from torch._inductor import config

    with config.patch(dynamic_scale_rblock=True):
        keep_kernel_choices()
        assert config.save_config_portable()["dynamic_scale_rblock"] is False  # part of the key of compiled graphs


def test_a_capture_that_failed_is_ended_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pool is released once: graphs captured earlier may share it."""
    underway, released = {(0, 7)}, list[tuple[int, int]]()

    def end(index: int, pool: int) -> None:
        if (index, pool) not in underway:
            raise RuntimeError("not currently recording")
        underway.remove((index, pool))

    for name, function in (("endAllocateToPool", end), ("releasePool", lambda *call: released.append(call))):
        monkeypatch.setattr(torch._C, f"_cuda_{name}", function)
    for _ in range(2):
        end_failed_capture(torch.device("cuda", 0), 7)
    assert released == [(0, 7)]


def test_compiled_kernels_are_read_from_a_bundle_alone() -> None:
    with pytest.raises(RuntimeError, match="cannot read"):
        load_compiled(b"no bundle")


def test_a_backend_is_found_by_its_name() -> None:
    graph = torch.fx.symbolic_trace(nn.Identity())
    assert compile_backend("eager")(graph, [torch.ones(1)])(torch.ones(1)) == 1


def test_fake_tensors_and_their_mode() -> None:
    with fake_mode(allow_non_fake_inputs=True) as mode:
        fake = torch.ones(2)
        with without_modes():
            assert torch.ones(2).tolist() == [1, 1]
    with fake_mode_of(fake):
        other = torch.zeros(3)
    assert fake_mode_of(other) is mode
    with fake_mode_of(torch.ones(1)):
        assert torch.zeros(1).tolist() == [0]


def test_operators_are_known_from_other_targets() -> None:
    assert is_operator(torch.ops.aten.add.Tensor)
    assert not is_operator(torch.add)


def test_traced_sizes_are_divided_by_these_functions() -> None:
    class Halves(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.new_zeros(x.shape[0] // 2)

    shape = {"x": {0: torch.export.Dim("num", min=4, max=64)}}
    graph = torch.export.export(Halves(), (torch.ones(8),), dynamic_shapes=shape).graph
    sizes = [one.meta["val"].node.expr for one in graph.nodes if isinstance(one.meta.get("val"), torch.SymInt)]
    assert any(isinstance(size, floor_divisions()) for size in sizes), sizes
    num = sympy.Symbol("num", integer=True, positive=True)
    assert [division(num, 2).subs(num, 6) for division in floor_divisions()] == [3, 3]


def test_the_exporter_logs_what_it_registers_by_this_name() -> None:
    from torch.onnx._internal.exporter import _registration

    assert _registration.logger is logging.getLogger(ONNX_REGISTRATION_LOGGER)


def test_every_operator_is_dispatched_through_a_mode() -> None:
    called: list[str] = []

    class Log(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            called.append(str(func))
            return func(*args, **(kwargs or {}))

    with Log():  # type: ignore[no-untyped-call]
        torch.ones(2) + 1
    assert called == ["aten.ones.default", "aten.add.Tensor"]


def test_leaves_are_found_and_mapped() -> None:
    assert tree_leaves(({"a": 1}, [2, (3,)])) == [1, 2, 3]
    assert tree_map_only(int, lambda number: -number, {"a": 1, "b": ["c", 2]}) == {"a": -1, "b": ["c", -2]}


def test_buffers_and_hooks_of_a_module() -> None:
    module = nn.Linear(1, 1)
    module.register_buffer("kept", torch.ones(1))
    module.register_buffer("computed", torch.ones(1), persistent=False)
    assert [has_persistent_buffer(module, name) for name in ("kept", "computed", "weight")] == [True, False, False]
    calls: list[str] = []
    module.register_forward_hook(lambda *_: calls.append("after"))
    module.register_forward_pre_hook(lambda *_: calls.append("before"))
    module(torch.ones(1))
    clear_forward_hooks(module)
    module(torch.ones(1))
    assert calls == ["before", "after"]


def test_every_name_is_tested() -> None:
    public = [name for name, value in vars(torch_private).items() if not name.startswith("_") and is_own(name, value)]
    assert [name for name in public if name not in globals()] == []


def is_own(name: str, value: Any) -> bool:
    return getattr(value, "__module__", "") == torch_private.__name__ or name in torch_private.__annotations__
