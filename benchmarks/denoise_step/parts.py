"""How fast each part of a denoising step can be alone on one GPU: attention, GEMMs, the fused passes.

    python -m benchmarks.denoise_step.parts [--out FILE]

Shapes are FLUX.1-dev's on 1, 2 and 4 ranks. Every time is of calls captured in a CUDA graph, over rotating inputs that
do not fit the cache together. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from engines.fast.gemm import Float8Gemm, NativeGemm
from engines.fast.kernels import HeadNorms, Modulation, norm_and_rotate, quantize_rows, residual_norm_modulate
from engines.torch_engine.exchange.heads import attend_tokens_first, local_attention

DEVICE, DTYPE = "cuda", torch.bfloat16
HEADS, DIM, CHANNELS = 24, 128, 3072
ROTATION, CALLS, REPEATS = 4, 12, 7
ATTENTION = ((4608, 24), (4608, 12), (4608, 6), (1536, 24), (1536, 6), (16896, 6))
"""Tokens and heads of one rank."""
FEATURES = ((9216, 3072), (12288, 3072), (3072, 12288), (3072, 3072))
"""Out and in, of q, k and v, the MLP's two GEMMs, and the output projection."""
ROWS = (4608, 2304, 1152, 1024, 128)
Part = tuple[str, float, float, Callable[[int], object]]
"""Name, floating-point operations, bytes, and the call on the input of that number."""


def median_us(call: Callable[[int], object]) -> float:
    """Of one call, replayed in a graph of ``CALLS``."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        for number in range(2):
            call(number)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for number in range(CALLS):
            call(number % ROTATION)
    times = []
    for _ in range(REPEATS + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1000 / CALLS)
    return float(statistics.median(times[2:]))


def attention_parts() -> Iterator[Part]:
    attend = local_attention(torch.device(DEVICE), DTYPE)
    for length, heads in ATTENTION:
        flop = 4.0 * length**2 * heads * DIM
        packed = [torch.randn(length, 1, 3, heads, DIM, device=DEVICE, dtype=DTYPE) for _ in range(ROTATION)]
        apart = [x.permute(2, 1, 3, 0, 4).contiguous() for x in packed]
        name = f"attention L{length} H{heads}"
        yield f"{name} cuDNN, packed", flop, 0, lambda n, packed=packed: attend_tokens_first(attend, packed[n])
        for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
            yield f"{name} {backend.name}, heads first", flop, 0, lambda n, a=apart, b=backend: sdpa(a[n], b)


def sdpa(qkv_3BHLD: Tensor, backend: SDPBackend) -> Tensor:
    with sdpa_kernel(backend):
        q_BHLD, k_BHLD, v_BHLD = qkv_3BHLD.unbind(0)
        return scaled_dot_product_attention(q_BHLD, k_BHLD, v_BHLD)


def gemm_parts() -> Iterator[Part]:
    for rows in ROWS:
        for out_features, in_features in FEATURES:
            flop = 2.0 * rows * out_features * in_features
            x = [torch.randn(rows, in_features, device=DEVICE, dtype=DTYPE) for _ in range(ROTATION)]
            weights = [torch.randn(out_features, in_features, device=DEVICE, dtype=DTYPE) for _ in range(ROTATION)]
            bias = torch.randn(out_features, device=DEVICE, dtype=DTYPE)
            plain = [NativeGemm(weight, None) for weight in weights]
            biased = [NativeGemm(weight, bias) for weight in weights]
            exact = [Float8Gemm(weight, bias) for weight in weights]
            quantized = [quantize_rows(rows_RC) for rows_RC in x]
            sums = [torch.randn(rows, out_features, device=DEVICE, dtype=DTYPE) for _ in range(ROTATION)]
            name = f"GEMM {rows} x {in_features} x {out_features}"
            yield f"{name}", flop, 0, lambda n, x=x, p=plain: p[n](x[n])
            yield f"{name} + bias", flop, 0, lambda n, x=x, p=biased: p[n](x[n])
            yield f"{name} + bias, into rows", flop, 0, lambda n, x=x, p=biased, s=sums: p[n](x[n], out=s[n])
            yield f"{name} + bias, GELU", flop, 0, lambda n, x=x, p=biased: p[n].activated(x[n])
            yield f"{name} added", flop, 0, lambda n, x=x, p=plain, s=sums: p[n].add(s[n], x[n])
            yield f"{name} + bias, fp8", flop, 0, lambda n, q=quantized, p=exact: p[n](q[n])
            yield f"{name} fp8 with quantising", flop, 0, lambda n, x=x, p=exact: p[n](x[n])


def pass_parts() -> Iterator[Part]:
    for rows in (4608, 1152):
        x = [torch.randn(rows, CHANNELS, device=DEVICE, dtype=DTYPE) for _ in range(ROTATION)]
        y = [torch.randn_like(x[0]) for _ in range(ROTATION)]
        vectors = torch.randn(3, 2, 1, CHANNELS, device=DEVICE, dtype=DTYPE)
        modulation = Modulation(shift_SBC=vectors[0], scale_SBC=vectors[1], first_rows=rows // 9)
        size = 2.0 * rows * CHANNELS
        for quantize in (False, True):
            name = f"residual and norm {rows}{', fp8' if quantize else ''}"
            yield (
                name, 0, size * (3.5 if quantize else 4),
                lambda n, x=x, y=y, v=vectors, m=modulation, q=quantize: residual_norm_modulate(
                    x[n], (y[n],), v[2], m, quantize=q
                ),
            )  # fmt: skip
        wide = [torch.randn(1, rows, 4 * CHANNELS, device=DEVICE, dtype=DTYPE) for _ in range(ROTATION)]
        yield f"GELU to fp8 {rows}", 0, 4 * size * 1.5, lambda n, w=wide: quantize_rows(w[n], gelu=True)
        groups = [torch.randn(4, rows, CHANNELS // 4, device=DEVICE, dtype=DTYPE) for _ in range(ROTATION)]
        yield f"join columns {rows}", 0, 2 * size, lambda n, g=groups: torch.cat(g[n].unbind(0), dim=1)
        yield f"join columns to fp8 {rows}", 0, 1.5 * size, lambda n, g=groups: quantize_rows(g[n])
        qkv = [torch.randn(rows, 3, HEADS, DIM, device=DEVICE, dtype=DTYPE) for _ in range(ROTATION)]
        angles = torch.randn(rows, DIM // 2, device=DEVICE)
        norms = HeadNorms(
            weight_S2D=torch.randn(2, 2, DIM, device=DEVICE, dtype=DTYPE), cos_LP=angles.cos(), sin_LP=angles.sin(),
            first_rows=rows // 9,
        )  # fmt: skip
        sent = torch.empty(4, rows, 1, 3, HEADS // 4, DIM, device=DEVICE, dtype=DTYPE).permute(1, 2, 3, 0, 4, 5)
        yield (
            f"norm and rotate {rows}, in place",
            0,
            4 * size,
            lambda n, q=qkv, h=norms: norm_and_rotate(q[n], h, q[n].view(-1, 1, 3, HEADS, DIM)),
        )
        yield (
            f"norm and rotate {rows}, for 4",
            0,
            6 * size,
            lambda n, q=qkv, h=norms, s=sent: norm_and_rotate(q[n], h, s),
        )


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    out = parser.parse_args().out
    results = []
    for parts in (attention_parts, gemm_parts, pass_parts):
        for name, flop, num_bytes, call in parts():
            try:
                time_us = median_us(call)
            except Exception as error:
                print(f"{name:52} failed: {error!s:.150}", flush=True)
                torch.cuda.synchronize()
                continue
            rate = f"{flop / time_us / 1e6:7.0f} TFLOP/s" if flop else f"{num_bytes / time_us / 1e3:7.0f} GB/s"
            print(f"{name:52} {time_us:9.1f} us {rate}", flush=True)
            results.append({"part": name, "time_us": round(time_us, 2), "rate": rate.strip()})
    document = json.dumps({"hardware": torch.cuda.get_device_name(), "results": results})
    if out:
        out.write_text(document)
    print(document)


if __name__ == "__main__":
    main()
