"""Explains in sentences an expert's role, a component's route, a result's verdict."""

from __future__ import annotations

from typing import TYPE_CHECKING

from experts.expert import Verdict
from experts.sizes import mib

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from agent.core.state import EngineStatistics
    from agent.deployment.build import Agent
    from agent.records.results import ResultRow
    from experts.catalog import Catalog
    from experts.graph import ExpertGraph, RouteStep


def explained_expert(expert: str, agent: Agent, engine: EngineStatistics) -> list[str]:
    where = [*_standing(expert, agent, engine), *_places(expert, agent, engine)]
    return [*where, _usage(expert, agent), *_costs(expert, agent)]


def explained_component(component: str, catalog: Catalog, agent: Agent, engine: EngineStatistics) -> list[str]:
    sentences = []
    for number, step in enumerate(catalog.components[component], start=1):
        passing = ", ".join(sorted(step.passing))
        least = f" with at least {step.min_score:g}" if step.min_score else ""
        sentences.append(f"Step {number} runs {step.expert}; {passing}{least} passes, all else is NG.")
        sentences += _standing(step.expert, agent, engine) + _places(step.expert, agent, engine)
    return sentences


def explained_result(row: ResultRow, graph: ExpertGraph) -> list[str]:
    result = row.result
    steps: Sequence[Mapping[str, object]] = result.detail.get("steps", ())
    sentences = [
        f"{result.subject.image} is {result.verdict}, as result {row.seq} of {result.finished_at:%Y-%m-%d %H:%M:%S}."
    ]
    route = {step.expert: step for step in graph.routes.get(result.subject.component or "", ())}
    for said in steps:
        expert, label, score = str(said["expert"]), str(said["label"]), float(str(said["score"]))
        step, outputs = route.get(expert), said.get("outputs")
        meaning = _meaning_of_outputs(step, outputs) if step and isinstance(outputs, list) else None
        sentences.append(f"{expert} answered {label} with {score:.3f}: {meaning or _meaning(step, label, score)}.")
    if result.reason:
        sentences.append(f"The reason: {result.reason}.")
    if result.verdict is Verdict.UNKNOWN and not steps:
        sentences.append("No expert judged it.")
    return sentences


def _meaning(step: RouteStep | None, label: str, score: float) -> str:
    if step is None:
        return "it is not on the component's route any more"
    if label not in step.passing:
        return f"only {', '.join(sorted(step.passing))} passes"
    if score < step.min_score:
        return f"less than the {step.min_score:g} that its step requires"
    return "passed"


def _meaning_of_outputs(step: RouteStep, outputs: Sequence[Mapping[str, object]]) -> str | None:
    """Labels that decided, for multilabel experts; None if the reported label decided."""
    labels = {str(output["label"]): bool(output["holds"]) for output in outputs}
    failing = [label for label, holds in labels.items() if holds and label not in step.passing]
    lacking = [label for label, holds in labels.items() if not holds and label in step.passing]
    if failing:
        return f"{', '.join(failing)} may not hold"
    return f"{', '.join(lacking)} has to hold" if lacking and step.passing <= labels.keys() else None


def _standing(expert: str, agent: Agent, engine: EngineStatistics) -> list[str]:
    name = agent.expert(expert)
    if name in engine.quarantined:
        return [f"{expert} gets no requests until its weights are corrected and reloaded: {engine.quarantined[name]}."]
    if name in engine.on_probation:
        return [f"{expert} gets no requests for the moment, and is tried again: {engine.on_probation[name]}."]
    return []


def _places(expert: str, agent: Agent, engine: EngineStatistics) -> list[str]:
    sentences = []
    copies = {
        row.copy
        for column in agent.setup.matrix.experts.values()
        if (row := column.get(agent.expert(expert))) is not None
    }
    for pool in engine.pools:
        if copies & set(pool.resident):
            sentences.append(f"{expert} is in memory {pool.name}.")
        elif copies & set(pool.loading):
            sentences.append(f"{expert} is on its way into memory {pool.name}.")
    full = ", ".join(f"{pool.name} holds {mib(pool.used_bytes)} of {mib(pool.expert_bytes)}" for pool in engine.pools)
    return sentences or [f"{expert} is on the SSD only: no request waits for it, others are used more often; {full}."]


def _usage(expert: str, agent: Agent) -> str:
    usage = agent.setup.matrix.usage
    mine = usage.get(agent.expert(expert), 0.0)
    rank = 1 + sum(other > mine for other in usage.values())
    return f"A request uses it with a probability of {mine:.4f}: rank {rank} of {len(usage)}."


def _costs(expert: str, agent: Agent) -> list[str]:
    sentences = []
    for processor, column in agent.setup.matrix.experts.items():
        row = column.get(agent.expert(expert))
        if row is not None:
            loads = ", ".join(f"{seconds * 1000:.1f} ms from {source}" for source, seconds in row.load_s.items())
            sentences.append(
                f"On {processor} a batch of one takes {row.performance.latency_s(1) * 1000:.1f} ms, a batch of "
                f"{row.performance.max_batch} {row.performance.latency_s(row.performance.max_batch) * 1000:.1f} ms; a "
                f"load takes {loads}."
            )
    return sentences
