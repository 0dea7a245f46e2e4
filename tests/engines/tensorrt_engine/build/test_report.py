"""The functions behind ``troupe build-engine``."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from engines.core.model import Branch
from engines.tensorrt_engine.build.bindings import Target
from engines.tensorrt_engine.build.builder import BuildError
from engines.tensorrt_engine.build.report import build_engine
from engines.tensorrt_engine.config import TensorRTConfig
from engines.tensorrt_engine.rules import TensorRTOptions
from tests.engines.tensorrt_engine.support.zoo import SPECIMENS, cast

SM89 = Target.parse("sm89")


def bf16_specimen(family: str) -> tuple[object, list[Branch]]:
    specimen = SPECIMENS[family]
    model = specimen.model()
    for module in model.modules.values():
        module.to(torch.bfloat16)
    return model, [Branch(inputs=cast(specimen, inputs, torch.bfloat16)) for inputs in specimen.buckets()]


@pytest.mark.slow  # the tests of the command build such a file in every run
@pytest.mark.parametrize("num_buckets", [1, 2])
def test_build_engine_says_what_the_file_holds(tmp_path: Path, num_buckets: int) -> None:
    model, buckets = bf16_specimen("flux")
    buckets = buckets[:num_buckets]
    config = TensorRTConfig(options=TensorRTOptions(cache_dir=tmp_path))
    (first,) = build_engine(model, buckets, config=config, num_ranks=2, target=SM89, visible=False)  # type: ignore[arg-type]
    assert first.collectives == {"all_to_all": 4, "all_gather": 1}
    assert (first.num_attentions, first.num_fused_attentions) == (2, 2)
    assert not first.was_cached
    assert first.num_weight_inputs == 66
    text = "\n".join(first.lines())
    assert text.startswith("ulysses2, 2 ranks, bfloat16, sm89, tensorrt")
    assert "1 all_gather, 4 all_to_all" in text
    assert "hidden_states" in text
    (again,) = build_engine(model, buckets, config=config, num_ranks=2, target=SM89, visible=False)  # type: ignore[arg-type]
    assert again.was_cached
    assert again.sha256 == first.sha256


@pytest.mark.slow
@pytest.mark.parametrize("flag", ["weight_streaming", "strip_weights"])
def test_weight_flags_build_or_say_why_not(tmp_path: Path, flag: str) -> None:
    """Stripping needs a GPU at build time in TensorRT-RTX 1.7; this fails once a version does not."""
    model, buckets = bf16_specimen("wan")
    config = TensorRTConfig(strategy="allgather_kv", options=TensorRTOptions(cache_dir=tmp_path, weights="constants"))
    with nullcontext() if flag == "weight_streaming" else pytest.raises(BuildError):
        options = {"num_ranks": 2, "target": SM89, "visible": False, flag: True}
        (report,) = build_engine(model, buckets[:1], config=config, **options)  # type: ignore[arg-type]
        assert report.num_weight_inputs == 0
