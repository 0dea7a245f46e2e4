"""A step in pieces: engine, the torch engine's ring attention, engine, and so on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from engines.core.kernel import Kernel
from engines.core.layout import TokenLayout
from engines.core.model import Branch, DenoiserModel, ModelInputs
from engines.parallel.attention import local_kernel
from engines.parallel.mesh import Team
from engines.parallel.strategy import team_kernel
from engines.tensorrt_engine.export.exported import Exported, rank_weights
from engines.tensorrt_engine.export.segments import Segment
from engines.tensorrt_engine.run.step import MakeRunner, Runner


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentedStep:
    """``runners[form]`` runs every piece of that form, with the piece's own weights bound at each run."""

    exported: Exported
    runners: tuple[Runner, ...]
    weights: Mapping[str, Tensor]
    kernel: Kernel
    rank_index: int

    def __call__(self, inputs: ModelInputs) -> Tensor:
        handed = self.exported.feed(inputs, self.rank_index)
        values = dict(handed)
        for segment in self.exported.segments:
            values.update(self._run(segment, values))
            if segment.attention is not None:
                q, k, v, out = segment.attention
                values[out] = self.kernel(values[q], values[k], values[v])[0]
        return self.exported.finish(handed, values)

    def close(self) -> None:
        for runner in self.runners:
            runner.close()

    def _run(self, segment: Segment, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        form = self.exported.graphs[segment.form]
        activations = {own: values[name] for own, name in zip(form.inputs, segment.inputs, strict=True)}
        weights = {own: self.weights[segment.weights[own]] for own in form.weights}
        outputs = self.runners[segment.form].run(activations | weights)
        return {name: outputs[own] for own, name in zip(form.outputs, segment.outputs, strict=True)}


def make_segmented_step(
    exported: Exported, model: DenoiserModel, branch: Branch, team: Team, make_runner: MakeRunner
) -> SegmentedStep:
    """With one runner per form. Every rank of the team makes this call at the same time."""
    weights = rank_weights(model, branch.module, team)
    some = next(iter(weights.values()))
    layout = TokenLayout.of(model.plan.streams, model.stream_lengths(branch.inputs), team.context.size)
    return SegmentedStep(
        exported=exported,
        runners=tuple(make_runner(form, {}, team) for form in exported.graphs),
        weights=weights,
        kernel=team_kernel(local_kernel(some.device, some.dtype), team, layout),
        rank_index=team.context.index,
    )
