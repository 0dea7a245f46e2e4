"""What strategy "auto" means: of the best by prediction, the one whose steps are fastest here; decided once, and kept.

The cost model's figures are measured anew at each start, and two ways that it holds for equal may differ by a sixth. So
it ranks the ways, real steps decide, and the decision is kept: a gang that is rebuilt gives the same bytes. How ranks
exchange heads is decided with it, by steps of the strategy that was the fastest.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from typing import Any

from engines.core.engine import Choosing
from engines.core.model import DenoiserModel
from engines.core.precision import scheme_of
from engines.core.rank import RankContext
from engines.core.storage.devices import device_name
from engines.parallel.communication.early_start import gang_groups
from engines.parallel.division import TeamSpecs
from engines.planner.auto import as_predicted, forecasts, lengths_of_choice, possible_team_sizes
from engines.planner.estimates import estimates_of
from engines.planner.exchange_rules import ExchangeRules
from engines.planner.kept import MIN_BRANCHES, Decision, KeptDecision
from engines.torch_engine.agreement import gathered, of_rank_0
from engines.torch_engine.config import check_divisible, check_spec, usual_exchange
from engines.torch_engine.engine import TorchEngine
from engines.torch_engine.options import TorchOptions
from engines.torch_engine.quiet import Quiet
from engines.torch_engine.trial import Trial

logger = logging.getLogger(__name__)


def decided_engine(
    model: DenoiserModel, context: RankContext, choosing: Choosing, *, precision: str, options: TorchOptions
) -> TorchEngine:
    """An engine that divides steps as was decided before, or is now. All ranks of the gang make the call.

    Candidates run in one engine, one after the other and on the same weights; what one has captured is released before
    the next. Ways that divide the weights are taken by prediction: to try them means to read all weights again.
    """
    check_divisible(model, "auto", context.num_ranks)
    gang_groups()  # waits for the early start: no exchange comes before it
    make = partial(TorchEngine, model, precision=precision, options=options)
    kept = _kept_decision(model, choosing, precision, options)
    sizes = possible_team_sizes(model, context.num_ranks)
    decision = of_rank_0(lambda: kept.find(sizes))
    if decision is not None and _suits(model, decision.specs):
        logger.info("strategy as it was decided: %s", _told(decision), extra={"file": str(kept.file)})
        return _as_decided(make(strategy=decision.specs), decision, options)
    gang: dict[str, Any] = {"rank": context.rank, "num_ranks": context.num_ranks, "groups": gang_groups()}
    branches = choosing.typical_step()
    known: dict[str, Any] = {"device": model.device, "num_branches": max(len(branches), MIN_BRANCHES)}
    quiet = Quiet(choosing.turns, model.device)
    with quiet.alone():
        plans = forecasts(model, precision=scheme_of(precision) or "native", **known, **gang)
    trial = Trial(model, branches, plans, every_team=choosing.every_team, quiet=quiet)
    engine = make(strategy=as_predicted(plans), others=trial.candidates)
    engine.division.use(trial.decide(engine, context))
    exchange = trial.decide_exchange(engine, peer_memory=options.peer_memory == "auto")
    specs = engine.division.specs
    fastest = Decision(specs=specs, exchange=exchange, estimates=estimates_of(plans, specs))
    decision = of_rank_0(lambda: kept.keep(fastest, trial.times_ms))
    logger.info("strategy is decided: %s", _told(decision), extra={"file": str(kept.file), "times_ms": trial.times_ms})
    if engine.division.knows(decision.specs):
        engine.division.use(decision.specs)
        return _as_decided(engine, decision, options)
    engine.close()  # another gang was first, and found a way that this one did not try
    return _as_decided(make(strategy=decision.specs), decision, options)


def _as_decided(engine: TorchEngine, decision: Decision, options: TorchOptions) -> TorchEngine:
    exchange = decision.exchange or usual_exchange(options)
    if isinstance(options.peer_memory, bool):  # gangs that left it open may have decided otherwise
        exchange = replace(exchange, peer_memory=options.peer_memory)
    if engine.config.exchange != exchange:
        engine.use(exchange)
    engine.estimates = decision.estimates
    return engine


def _kept_decision(model: DenoiserModel, choosing: Choosing, precision: str, options: TorchOptions) -> KeptDecision:
    """What the decision depends on, beside the model and the software: the ranks' devices and the step."""
    kept = KeptDecision(folder=choosing.folder, name=choosing.name, facts=choosing.facts)
    return kept.about(
        {
            "devices": ", ".join(gathered(device_name(str(model.device)))),
            "precision": precision,
            "peer_memory": str(options.peer_memory is not False),
            "tokens": str(dict(lengths_of_choice(model, model.device))),
            "every_team": str(choosing.every_team),
        }
    )


def _suits(model: DenoiserModel, specs: TeamSpecs) -> bool:
    try:
        for spec in specs.every():
            check_spec(model, spec)
    except ValueError as error:
        logger.warning("what was decided does not suit the model (%s): it is decided anew", error)
        return False
    return True


def _told(decision: Decision) -> str:
    specs, exchange = decision.specs, decision.exchange or ExchangeRules()
    names = (f"{size}: {' or '.join(spec.name for spec in dict.fromkeys(specs.of(size)))}" for size in specs.sizes)
    return f"{'; '.join(names)}; exchange {exchange.describe()}"
