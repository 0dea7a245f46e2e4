"""Build engine files once per test session, with the real builder and a shared cache."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator

import pytest
import torch
from torch.onnx._internal.exporter._registration import ONNXRegistry

from engines.core.model import Branch, DenoiserModel
from engines.core.spec import ParallelSpec
from engines.tensorrt_engine.build.bindings import Target
from engines.tensorrt_engine.build.builder import BuildError, BuildOptions, build
from engines.tensorrt_engine.export.exported import EngineExport, export_segments
from engines.tensorrt_engine.export.trace import offline_team
from tests.engines.tensorrt_engine.support.all_ranks import Case, export_case
from tests.engines.tensorrt_engine.support.cases import DTYPES, Key
from tests.engines.tensorrt_engine.support.zoo import SPECIMENS, cast

Build = Callable[..., bytes]
read_translations = functools.cache(ONNXRegistry.from_torchlib)
"""The cache outlives the package fixture, which two processes set up several times."""


@pytest.fixture(scope="package", autouse=True)
def translations() -> Iterator[None]:
    """Read the exporter's table of translations once; each export would read the source of five hundred."""

    def copied(opset_version: int) -> ONNXRegistry:
        registry = ONNXRegistry()
        registry._opset_version = opset_version
        registry.functions = {target: [*known] for target, known in read_translations(opset_version).functions.items()}
        return registry

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ONNXRegistry, "from_torchlib", staticmethod(copied))
        yield


@pytest.fixture(scope="session")
def build_file() -> Build:
    """Return ``build_file(onnx_bytes, "sm89", **options)`` -> engine file; each caller gets a refusal anew."""
    answers: dict[tuple[str, str], bytes | BuildError] = {}

    def engine_file_of(onnx_file: bytes, target: str = "sm89", **options: object) -> bytes:
        key = (hashlib.sha256(onnx_file).hexdigest(), f"{target} {options}")
        if key not in answers:
            try:
                answers[key] = build(onnx_file, BuildOptions(target=Target.parse(target), **options)).engine_file  # type: ignore[arg-type]
            except BuildError as error:
                answers[key] = error
        answer = answers[key]
        if isinstance(answer, BuildError):
            raise answer
        return answer

    return engine_file_of


Exports = Callable[[Key], Case]


@pytest.fixture(scope="session")
def exports() -> Exports:
    """Export each case of the matrix once."""

    @functools.cache
    def case_of(key: Key) -> Case:
        specimen, dtype = SPECIMENS[key.family], DTYPES[key.dtype]
        model = specimen.model()
        for module in model.modules.values():
            module.to(dtype)
        return export_case(model, cast(specimen, specimen.inputs(), dtype), key.spec)

    return case_of


Ring = tuple[DenoiserModel, EngineExport]


@pytest.fixture(scope="session")
def ring() -> Ring:
    """Export four blocks of Wan in half precision for a ring of two ranks: in segments."""
    specimen = SPECIMENS["wan"]
    model = specimen.model()
    transformer = model.modules["transformer"]
    transformer.blocks.extend([type(transformer).from_config(transformer.config).blocks[0] for _ in range(2)])  # type: ignore[operator, union-attr, attr-defined]
    transformer.to(torch.float16)
    with offline_team(ParallelSpec.of("ring", 2)) as team:
        return model, export_segments(model, Branch(inputs=cast(specimen, specimen.inputs(), torch.float16)), team)
