"""A FLUX transformer's parameters arranged as the products of the fast path: no copies, one view or stack each."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from engines.core.fast_model import FastModel, Precision
from engines.core.model import ModelInputs
from engines.fast.gemm import Product, make_product, stack
from engines.fast.interface import StepParts
from pipelines.flux.modulation import embedded_times, modulation_vectors


@dataclass(frozen=True, slots=True)
class Pair:
    """One product per stream."""

    text: Product
    image: Product


@dataclass(frozen=True, kw_only=True, slots=True)
class DualWeights:
    qkv: Pair
    out: Pair
    up: Pair
    down: Pair
    head_norms_S2D: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class SingleWeights:
    """``proj_out`` is cut by input: attention's columns, and the MLP's with the bias."""

    qkv: Product
    up: Product
    out_mlp: Product
    out_attention: Product
    head_norms_S2D: Tensor


class FluxWeights:
    """Implements ``FastWeights``. ``module`` keeps working: its query, key and value weights become views."""

    def __init__(
        self,
        module: nn.Module,
        precision: Precision,
        *,
        make_model: Callable[[FluxWeights, StepParts], FastModel],
    ) -> None:
        self.module: Any = module
        self.precision = precision
        self._make_model = make_model
        with torch.no_grad():
            self.duals = tuple(_dual(block, precision) for block in children(module, "transformer_blocks"))
            self.singles = tuple(_single(block, precision) for block in children(module, "single_transformer_blocks"))

    def quantizes_after_dual(self, index: int) -> bool:
        """Whether what follows dual block ``index`` reads quantised rows: blocks do, the last projection does not."""
        return self.precision == "fp8" and (index + 1 < len(self.duals) or bool(self.singles))

    def model(self, parts: StepParts) -> FastModel:
        return self._make_model(self, parts)

    def scheduled(self, inputs: ModelInputs, timesteps_SB: Tensor) -> dict[str, Tensor]:
        temb_SBC = embedded_times(self.module, inputs, timesteps_SB)
        num_steps, batch, _ = temb_SBC.shape
        vectors_VXC = modulation_vectors(self.module, temb_SBC.flatten(0, 1))
        vectors_VSBC = vectors_VXC.view(vectors_VXC.shape[0], num_steps, batch, -1)
        return {"modulation_VBC": vectors_VSBC.transpose(0, 1).contiguous()}


def children(module: nn.Module, name: str) -> Iterable[nn.Module]:
    return module.get_submodule(name).children()


def _dual(block: Any, precision: Precision) -> DualWeights:
    attn = block.attn
    text = (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)
    return DualWeights(
        qkv=Pair(_stacked(text, precision), _stacked((attn.to_q, attn.to_k, attn.to_v), precision)),
        out=Pair(_product(attn.to_add_out, precision), _product(attn.to_out[0], precision)),
        up=Pair(_product(block.ff_context.net[0].proj, precision), _product(block.ff.net[0].proj, precision)),
        down=Pair(_product(block.ff_context.net[2], precision), _product(block.ff.net[2], precision)),
        head_norms_S2D=torch.stack((_norms(attn.norm_added_q, attn.norm_added_k), _norms(attn.norm_q, attn.norm_k))),
    )


def _single(block: Any, precision: Precision) -> SingleWeights:
    attn, out = block.attn, block.proj_out
    channels = out.out_features
    return SingleWeights(
        qkv=_stacked((attn.to_q, attn.to_k, attn.to_v), precision),
        up=_product(block.proj_mlp, precision),
        out_mlp=make_product(out.weight[:, channels:], out.bias, precision),
        out_attention=make_product(out.weight[:, :channels], None, precision),
        head_norms_S2D=_norms(attn.norm_q, attn.norm_k)[None],
    )


def _stacked(linears: tuple[Any, ...], precision: Precision) -> Product:
    return make_product(*stack(linears), precision)


def _product(linear: Any, precision: Precision) -> Product:
    return make_product(linear.weight, linear.bias, precision)


def _norms(norm_q: Any, norm_k: Any) -> Tensor:
    return torch.stack((norm_q.weight, norm_k.weight))
