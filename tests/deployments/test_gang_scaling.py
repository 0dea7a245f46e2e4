"""Gangs scale by predicted work through Ray Serve's own hooks, and requests go to the gang that ends first."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID, RequestMetadata
from ray.serve._private.common import TimeStampedValue as Point
from ray.serve._private.deployment_scheduler import DeploymentScheduler
from ray.serve.config import AutoscalingConfig as ServeAutoscaling
from ray.serve.config import AutoscalingContext
from ray.serve.request_router import PendingRequest

from deployments import autoscaling
from deployments.app import build_app, work_scaling
from deployments.autoscaling import ScaleByWork
from deployments.config import AppConfig
from deployments.ray_private import leave_replica
from deployments.request_router import FinishTimeRouter
from deployments.stages.replica_load import ReplicaLoad, kind_of, new_work
from deployments.stages.stage_config import DenoiserConfig, GangScalingConfig
from engines.gang.autoscaling import GangReport, Observation
from engines.gang.jobs.job import Job, JobDone
from engines.gang.load import GangLoad, OpenWork
from pipelines.request import Lora, MediaRequest, mix_of
from pipelines.solver import Solver
from tests.deployments.support.fake_service import PICTURES
from tests.support.unhurried import UNHURRIED

DEPLOYMENT = DeploymentID("Denoiser-m", "troupe")
A, B = (ReplicaID(name, DEPLOYMENT) for name in "ab")
OLD = GangReport(num_arrived=1000, arrived_s=5000.0, arrived_s2=25_000.0, start_s=5.0)
RULES: dict[str, Any] = {"target_wait_s": 10.0, "min_gangs": 0, "max_gangs": 4, "idle_s": 60.0}


@pytest.fixture(autouse=True)
def _no_demands() -> Iterator[None]:
    autoscaling.DEMANDS.clear()
    yield
    autoscaling.DEMANDS.clear()


def context(
    now_s: float,
    reports: Mapping[ReplicaID, GangReport | None],
    *,
    target: int = 0,
    num_requests: float = 0.0,
    age_s: float = 0.0,
    name: str = "Denoiser-m",
) -> AutoscalingContext:
    """Return Serve's input of a policy for replicas that reported ``age_s`` ago (None: not yet)."""
    told = {replica: asdict(report) for replica, report in reports.items() if report is not None}
    metrics = {
        key: {replica: [Point(now_s - age_s, values[key])] for replica, values in told.items()}
        for key in GangReport.__dataclass_fields__
    }
    return AutoscalingContext(
        deployment_id=DEPLOYMENT,
        deployment_name=name,
        app_name="troupe",
        current_num_replicas=len(reports),
        target_num_replicas=target,
        running_replicas=list(reports),
        total_num_requests=num_requests,
        total_queued_requests=0.0,
        aggregated_metrics=None,
        raw_metrics=metrics,
        capacity_adjusted_min_replicas=0,
        capacity_adjusted_max_replicas=4,
        policy_state={},
        last_scale_up_time=None,
        last_scale_down_time=None,
        current_time=now_s,
        config=None,
    )


def busy(now_s: float, load: float = 0.5, **fields: Any) -> GangReport:
    """Return the report of a gang with jobs of 2 s, ``load`` of them side by side."""
    num = load * now_s / 2
    return replace(
        GangReport(num_jobs=1, num_arrived=num, arrived_s=2 * num, arrived_s2=4 * num, start_s=5.0), **fields
    )


def test_requests_without_a_gang_bring_one_and_idle_time_ends_it() -> None:
    policy = ScaleByWork(**RULES)
    assert policy(context(0.0, {}))[0] == 0
    assert policy(context(1.0, {}, num_requests=3.0))[0] == 1
    idle = GangReport(num_arrived=3, arrived_s=6.0, arrived_s2=12.0, start_s=5.0)
    targets = {now_s: policy(context(now_s, {A: idle}, target=1))[0] for now_s in range(5, 70)}
    assert targets[60] == 1
    assert targets[69] == 0
    assert policy(context(71.0, {A: idle}, target=1, num_requests=0.2))[0] == 1, "Serve would start it again"


def test_a_backlog_of_few_long_jobs_brings_a_gang_which_many_short_ones_do_not() -> None:
    """Serve's own policy counts requests: it does the opposite."""
    wanted = {}
    for name, num_jobs, backlog_s in (("one long", 1, 300.0), ("many short", 9, 2.0)):
        policy = ScaleByWork(**RULES)
        for now_s in range(60):
            report = busy(now_s, num_jobs=num_jobs, backlog_s=backlog_s)
            wanted[name] = policy(context(now_s, {A: report}, target=1))[0]
    assert wanted["one long"] > wanted["many short"] == 1


def test_a_gang_that_does_not_report_is_taken_for_busy() -> None:
    for reports, age_s in ({A: None}, 0.0), ({A: GangReport()}, 60.0):
        policy = ScaleByWork(**{**RULES, "idle_s": 0.0})
        for now_s in range(0, 200, 10):
            assert policy(context(now_s, reports, target=1, age_s=age_s))[0] == 1


Reports = Mapping[ReplicaID, GangReport | None]


@pytest.mark.parametrize("missed", [[{}, {A: None}], [{A: None}], [{A: OLD}, {A: None}], []])
def test_a_gang_of_many_jobs_that_is_heard_again_brings_no_gangs_and_stays(missed: list[Reports]) -> None:
    """The controller restarts, or the gang's replica hangs for a while: no job has arrived."""
    policy, later = ScaleByWork(**RULES), [{A: OLD}, {A: OLD}]
    seen: list[Reports] = [*missed, *later]
    for now_s, reports in enumerate(seen):
        assert policy(context(now_s, reports, target=1))[0] == 1


NODES = ("head", "x", "y", "z")
PLACES = st.lists(st.tuples(st.sampled_from(NODES), st.booleans()), min_size=1, max_size=8)


@settings(max_examples=200, **UNHURRIED)
@given(PLACES)
def test_the_idle_gangs_are_those_that_serve_ends_before_any_with_a_job(places: list[tuple[str, bool]]) -> None:
    """Serve itself chooses the replicas."""
    scheduler = object.__new__(DeploymentScheduler)
    names = [ReplicaID(str(number), DEPLOYMENT) for number in range(len(places))]
    state: dict[str, Any] = {
        **{key: {DEPLOYMENT: {}} for key in ("_pending_replicas", "_launching_replicas")},
        "_recovering_replicas": {DEPLOYMENT: set()},
        "_deployments": {DEPLOYMENT: SimpleNamespace(label_selector=None, bundle_label_selector=None)},
        "_running_replicas": {DEPLOYMENT: dict(zip(names, (node for node, _ in places), strict=True))},
        "_head_node_id": "head",
        "_cluster_node_info_cache": SimpleNamespace(get_node_labels=lambda node: {}),
    }
    scheduler.__dict__.update(state)
    busy_ones = {name for name, (_, is_busy) in zip(names, places, strict=True) if is_busy}
    numbers = range(1, len(names) + 1)
    num_idle = sum(not scheduler._get_replicas_to_stop(DEPLOYMENT, num) & busy_ones for num in numbers)
    gangs = {
        name.unique_id: GangReport(num_jobs=is_busy, node=NODES.index(node), on_head=node == "head")
        for name, (node, is_busy) in zip(names, places, strict=True)
    }
    assert Observation(now_s=0.0, target=len(names), gangs=gangs).num_idle == num_idle


def test_decisions_are_a_second_apart_however_often_serve_asks() -> None:
    policy = ScaleByWork(**RULES)
    assert policy(context(100.0, {A: busy(100)}, target=1))[0] == 1
    late = busy(100, backlog_s=500.0)
    assert policy(context(100.5, {A: late}, target=1))[0] == 1
    assert policy(context(101.0, {A: late}, target=1))[0] > 1


def test_models_of_one_application_share_ranks_by_priority() -> None:
    shared: dict[str, Any] = {**RULES, "num_ranks": 2, "max_ranks": 4}
    low, high = ScaleByWork(**shared, priority=1.0), ScaleByWork(**shared, priority=2.0)
    for now_s in range(120):
        report = busy(now_s, load=3.0, backlog_s=100.0)
        wanted = low(context(now_s, {A: report}, target=1, name="low"))[0]
    assert wanted == 2, "both gangs of two ranks: no other model wants them"
    for now_s in range(120, 240):
        report = busy(now_s, load=3.0, backlog_s=100.0)
        high_wants = high(context(now_s, {A: report}, target=1, name="high"))[0]
        low_wants = low(context(now_s, {A: report, B: report}, target=wanted, name="low"))[0]
        wanted = low_wants
    assert (high_wants, low_wants) == (2, 0)
    for now_s in range(240, 260):
        report = busy(now_s, load=3.0, backlog_s=100.0)
        wanted = low(context(now_s, {A: report}, target=1, name="low"))[0]
    assert wanted == 2, "a silent model wants nothing"


def test_serve_takes_the_policy_and_its_own_delays_do_not_add_to_it() -> None:
    scaling = GangScalingConfig(
        target_wait_s=8.0, min_replicas=0, max_replicas=3, idle_s=90.0, priority=2.0, gangs_per_node=2
    )
    options = work_scaling(DenoiserConfig(autoscaling=scaling, num_ranks=2), max_ranks=6)
    with pytest.warns(DeprecationWarning, match="metrics_interval_s"):
        known = ServeAutoscaling(**options["autoscaling_config"])
    assert (known.upscale_delay_s, known.downscale_delay_s, known.max_replicas) == (0.0, 0.0, 3)
    policy = known.policy.get_policy()(**known.policy.policy_kwargs)
    assert policy(context(0.0, {}, num_requests=1.0))[0] == 2, "a gang, and the other of its node"
    assert autoscaling.DEMANDS["Denoiser-m"][1].priority == 2.0, "pickled by value, it shares the module's demands"


@pytest.mark.filterwarnings("ignore:The `metrics_interval_s` field")
def test_an_application_of_such_gangs_is_built() -> None:
    gang = {"autoscaling": {"target_wait_s": 5.0, "max_replicas": 2}, "num_ranks": 1}
    args = {"models": [{"name": "flux-shapes", "denoiser": gang}], "fork_workers": False, "max_ranks": 2}
    build_app(AppConfig.model_validate(args))


# Requests.


class Replica:
    max_ongoing_requests = 9

    def __init__(self, replica_id: ReplicaID, load: GangLoad | None) -> None:
        self.replica_id = replica_id
        self.routing_stats = {} if load is None else load.to_stats()

    async def get_queue_len(self, *, deadline_s: float) -> int:
        return 0


REQUEST = replace(PICTURES.request(model="m", prompt="a"), num_inference_steps=10)


def gang(*left_s: float, knows: MediaRequest | None = REQUEST) -> GangLoad:
    jobs = {f"job {left}": OpenWork(left, left) for left in left_s}
    return GangLoad(jobs=jobs, step_s={} if knows is None else {kind_of(knows): 0.1})


def pending(job_id: str, request: MediaRequest = REQUEST, method: str = "denoise") -> PendingRequest:
    metadata = RequestMetadata(request_id=job_id, internal_request_id=job_id, call_method=method)
    args: list[Any] = [job_id, request, [], False, 0.0, False]
    return PendingRequest(args=args if method == "denoise" else [job_id], kwargs={}, metadata=metadata)


def router_of(**loads: GangLoad | None) -> tuple[FinishTimeRouter, list[Any]]:
    untyped: Any = FinishTimeRouter
    router: FinishTimeRouter = untyped(
        deployment_id=DEPLOYMENT,
        handle_source=DeploymentHandleSource.REPLICA,
        use_replica_queue_len_cache=True,
    )
    router.initialize_state()
    replicas: list[Any] = [Replica(ReplicaID(name, DEPLOYMENT), load) for name, load in loads.items()]
    router.update_replicas(replicas)
    return router, replicas


async def choice(router: FinishTimeRouter, replicas: list[Any], one: PendingRequest) -> list[str]:
    ranked = await router.choose_replicas(replicas, one)
    return [replica.replica_id.unique_id for rank in ranked for replica in rank]


async def test_a_request_goes_to_the_gang_with_less_work_in_front_of_it() -> None:
    router, replicas = router_of(many=gang(0.2, 0.2, 0.2), one=gang(0.9))
    assert await choice(router, replicas, pending("x")) == ["many", "one"]
    assert (await router._choose_replica_for_request(pending("y"))).replica_id.unique_id == "one", "x is at the other"


async def test_a_broken_gang_is_not_offered_again_by_the_reports_of_others() -> None:
    router, replicas = router_of(broken=gang(), busy=gang(0.9))
    handle: Any = SimpleNamespace(_router=SimpleNamespace(_asyncio_router=SimpleNamespace(request_router=router)))
    leave_replica(handle, "broken")
    assert [one.unique_id for one in router.curr_replicas] == ["busy"]
    replicas[1].routing_stats = gang(0.8).to_stats()
    router.update_replicas(replicas)
    assert [one.unique_id for one in router.curr_replicas] == ["busy"]
    router.update_replicas(replicas[1:])
    assert router.broken == set(), "Serve's controller knows"


async def test_pictures_that_come_at_once_are_spread() -> None:
    router, replicas = router_of(a=gang(), b=gang())
    firsts = [(await choice(router, replicas, pending(str(number))))[0] for number in range(4)]
    assert firsts == ["a", "b", "a", "b"]


async def test_what_another_gang_took_counts_there() -> None:
    router, replicas = router_of(a=gang(), b=gang())
    assert (await choice(router, replicas, pending("1")))[0] == "a"
    router.on_request_routed(pending("1"), replicas[1].replica_id, None)
    assert (await choice(router, replicas, pending("2")))[0] == "a"


@pytest.mark.parametrize("loads", [{"a": gang(knows=None), "b": gang(knows=None)}, {"a": gang(), "b": None}])
async def test_without_a_prediction_two_replicas_are_compared_by_their_requests(loads: dict[str, Any]) -> None:
    router, replicas = router_of(**loads)
    (rank,) = await router.choose_replicas(replicas, pending("x"))
    assert {one.replica_id.unique_id for one in rank} == {"a", "b"}


async def test_other_calls_are_routed_as_ever() -> None:
    router, replicas = router_of(a=gang(), b=gang(5.0))
    (rank,) = await router.choose_replicas(replicas, pending("x", method="metrics"))
    assert len(rank) == 2
    assert len((await router.choose_replicas(replicas, None))[0]) == 2


def test_a_kind_is_what_decides_the_time_of_a_step() -> None:
    others = [
        replace(REQUEST, width=REQUEST.width + 16),
        replace(REQUEST, num_frames=5),
        replace(REQUEST, true_cfg_scale=4.0),
        replace(REQUEST, loras=(Lora(name="ink"),)),
        replace(REQUEST, sound=False),
        replace(REQUEST, num_video_frames=5),
        replace(REQUEST, num_video_frames=13),
        replace(REQUEST, attention="fp8"),
        replace(REQUEST, num_pictures=1),
        replace(REQUEST, has_control=True),
        replace(REQUEST, solver=Solver(guidance_scale_2=3.5)),
    ]
    assert len({kind_of(one) for one in (REQUEST, *others)}) == len(others) + 1
    assert kind_of(replace(REQUEST, seed=7, prompt="b")) == kind_of(REQUEST)
    assert new_work(replace(REQUEST, service_tier="flex")).priority == 0.25


# Reports of replicas.


def replica_load(work_s: float | None = 1.0, **open_s: float) -> ReplicaLoad:
    works = {job_id: OpenWork(left_s, left_s) for job_id, left_s in open_s.items()}
    report = GangReport(backlog_s=sum(open_s.values()), num_jobs=len(open_s), num_arrived=5, arrived_s=5.0)
    stub = SimpleNamespace(
        config=SimpleNamespace(policy="shortest"),
        report=lambda: report,
        open_work=lambda: works,
        work_s=lambda job: work_s,
        wake_s=2.5,
        additions=mix_of((Lora(name="ink"),)),
        switch_s=0.125,
    )
    node_id = "9" * 44 + "00000000000a"
    return ReplicaLoad(cast("Any", stub), start_s=12.0, node_id=node_id, head_id=node_id)


def done(*, was_warm: bool = True, denoise_s: float = 1.0) -> JobDone:
    return JobDone(job_id="j", latents=cast("Any", None), queue_s=0.0, denoise_s=denoise_s, was_warm=was_warm)


def job(request: MediaRequest = REQUEST) -> Job:
    return Job(job_id="j", request=request, conditioning=None, num_steps=10)


def test_a_replica_reports_kinds_that_it_has_run_and_what_the_first_of_a_kind_cost() -> None:
    load = replica_load(a=3.0)
    assert GangLoad.of_stats(load.routing_stats()).step_s == {}
    load.hear(job(), done(was_warm=False, denoise_s=9.0))
    load.hear(job(), done(was_warm=False, denoise_s=7.0))
    load.hear(job(), done())
    reported = GangLoad.of_stats(load.routing_stats())
    assert reported.step_s == {kind_of(REQUEST): pytest.approx(0.1)}
    assert reported.cold_s == 6.0, "beside it others may have run"
    assert reported.jobs == {"a": OpenWork(3.0, 3.0)}
    assert reported.wake_s == 2.5
    assert (reported.switch_s, reported.adapters) == (
        0.125,
        new_work(replace(REQUEST, loras=(Lora(name="ink"),))).adapters,
    )
    assert reported.adapters != new_work(replace(REQUEST, loras=(Lora(name="ink", scale=0.5),))).adapters
    assert new_work(REQUEST).adapters == ""


def test_what_cannot_be_predicted_is_not_reported() -> None:
    load = replica_load(work_s=None)
    load.hear(job(), done())
    assert GangLoad.of_stats(load.routing_stats()).step_s == {}


def test_a_request_on_its_way_counts_as_a_job() -> None:
    load = replica_load(a=3.0)
    load.hear(job(), done())
    with load.coming("b", REQUEST):
        assert load.autoscaling_stats() == pytest.approx(
            {"backlog_s": 4.0, "num_jobs": 2, "num_arrived": 5, "arrived_s": 5.0, "arrived_s2": 0.0}
            | {"spare_s": float("inf"), "start_s": 12.0, "node": 10.0, "on_head": 1.0}
        )
        assert GangLoad.of_stats(load.routing_stats()).jobs["b"].left_s == pytest.approx(1.0)
    assert load.autoscaling_stats()["num_jobs"] == 1
    assert set(load.autoscaling_stats()) == set(GangReport.__dataclass_fields__)


async def test_a_cancelled_request_is_no_longer_on_its_way() -> None:
    load = replica_load()

    async def wait() -> None:
        with load.coming("b", REQUEST):
            await asyncio.sleep(60)

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    assert load.autoscaling_stats()["num_jobs"] == 1
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert load.autoscaling_stats()["num_jobs"] == 0
