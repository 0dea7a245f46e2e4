"""SGLang Diffusion's FLUX transformer (sglang 0.5.16) on the same weights, Ulysses over all ranks, as it serves it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.models.flux import architecture
from benchmarks.models.making import default_dtype

TRAINED_STEPS = 1000
"""It takes timesteps and guidance times this, as its pipeline hands them over."""


def sglang_step(module: Any, inputs: dict[str, Tensor], *, compiled: bool) -> Callable[[], Tensor]:
    """``compiled``: as with its ``--enable-torch-compile``; without, it runs eagerly, which is its default.

    Text and picture are cut among the ranks, the prediction is gathered, all by its own functions.
    """
    transformer = _transformer(module, compiled)
    from sglang.multimodal_gen.configs.pipeline_configs.base import shard_rotary_emb_for_sp
    from sglang.multimodal_gen.runtime.distributed.sp_shard_utils import gather_seq, shard_seq
    from sglang.multimodal_gen.runtime.managers.forward_context import set_forward_context

    picture = [shard_rotary_emb_for_sp(x) for x in transformer.rotary_emb(inputs["img_ids"])]
    text = transformer.rotary_emb(inputs["txt_ids"])
    mine, plan = shard_seq(inputs["hidden_states"])
    kept = {name: inputs[name] for name in ("encoder_hidden_states", "pooled_projections")}
    times = {name: inputs[name] * TRAINED_STEPS for name in ("timestep", "guidance")}
    rotary = tuple(torch.cat(pair, dim=0) for pair in zip(text, picture, strict=True))

    def step() -> Tensor:
        with set_forward_context(current_timestep=0, attn_metadata=None):
            part_BSD = transformer(hidden_states=mine, freqs_cis=rotary, **kept, **times)
        whole: Tensor = gather_seq(part_BSD, plan.orig_len)
        return whole

    return step


@cache
def _transformer(module: Any, compiled: bool) -> Any:
    """Theirs, whose parameters are those of ``module``: the names are the same."""
    _begin(dist.get_world_size())
    from sglang.multimodal_gen.configs.models.dits.flux import FluxArchConfig, FluxConfig
    from sglang.multimodal_gen.runtime.models.dits.flux import FluxTransformer2DModel
    from sglang.multimodal_gen.runtime.utils.torch_compile import (
        build_torch_compile_kwargs,
        maybe_enable_inductor_compute_comm_overlap,
    )

    config = FluxConfig(arch_config=FluxArchConfig(**architecture(module)))
    with default_dtype(next(module.parameters()).dtype), torch.device("meta"):
        transformer: Any = FluxTransformer2DModel(config, hf_config=dict(module.config))
    transformer.load_state_dict(module.state_dict(), assign=True)
    transformer.eval().requires_grad_(False)
    if compiled:
        maybe_enable_inductor_compute_comm_overlap()
        torch._dynamo.reset()
        transformer.compile(**build_torch_compile_kwargs(mode="max-autotune-no-cudagraphs"))
    return transformer


@cache
def _begin(world: int) -> None:
    import transformers

    register = transformers.AutoConfig.register
    # It registers models that transformers have had since.
    transformers.AutoConfig.register = staticmethod(lambda *names, **_: register(*names, exist_ok=True))
    from sglang.multimodal_gen.runtime.distributed import parallel_state
    from sglang.multimodal_gen.runtime.server_args import server_args

    server_args.set_global_server_args(_Arguments(tp_size=1, sp_degree=world))
    parallel_state.maybe_init_distributed_environment_and_model_parallel(
        tp_size=1, sp_size=world, ulysses_degree=world, ring_degree=1
    )


class _Arguments(SimpleNamespace):
    """A server's arguments, of which a transformer asks few; None is the default of those."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)
