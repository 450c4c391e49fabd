"""Explains in sentences an expert's role, a component's route, a result's verdict, a request's course.

Guarantees: each time is of the flight record, or of the stored course. What the record no longer holds is not guessed.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from agent.core.names import expert_of, line_name
from experts.expert import Verdict
from experts.sizes import mib

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from agent.core.state import EngineStatistics
    from agent.deployment.build import Agent
    from agent.records.verdict import Result
    from agent.runtime.flight_record import Eviction
    from experts.catalog import Catalog
    from experts.expert import LabelScore
    from experts.graph import ExpertGraph, RouteStep


EVICTIONS_SHOWN = 5
STAGES = {
    0: "stage 0, whatever its rank",
    1: "stage 1, no expert that runs before it is in memory or awaited",
    2: "stage 2, the least used",
    3: "stage 3, its next queued use is the furthest",
}
CLAIMS = {
    "overdue": "a queue's head waited beyond the bound",
    "head": "a queue's head needed it",
    "patient": "the head of a short queue needed it",
    "prefetch": "a later group of a queue will need it",
    "bypass": "a later group will need it, past a busy link",
    "stage": "a later group will need it, in front of a full device",
    "cache": "it passes on its way to the device",
    "pinned": "it is pinned",
    "early": "a later group will need it, and the other copy was spare",
    "spare": "there was spare room, and the other copy was spare",
    "idle": "a request of idle precedence needed it, and the other copy was spare",
    "shortage": "the memory's budget was lowered",
    "unusable": "requests must not use it, or it was unloaded",
}


def explained_expert(expert: str, agent: Agent, engine: EngineStatistics) -> list[str]:
    where = [*_standing(expert, agent, engine), *_places(expert, agent, engine)]
    why = [*_under_way(expert, agent), *_evictions(expert, agent), *_stays(expert, agent, engine)]
    return [*where, *why, _usage(expert, agent), *_costs(expert, agent), *_seen(expert, agent)]


def explained_component(component: str, catalog: Catalog, agent: Agent, engine: EngineStatistics) -> list[str]:
    sentences = []
    for number, step in enumerate(catalog.components[component], start=1):
        passing = ", ".join(sorted(step.passing))
        least = f" with at least {step.min_score:g}" if step.min_score else ""
        sentences.append(f"Step {number} runs {step.expert}; {passing}{least} passes, all else is NG.")
        sentences += _standing(step.expert, agent, engine) + _places(step.expert, agent, engine)
    return sentences


def explained_result(result: Result, graph: ExpertGraph, course: Mapping[str, Any] | None) -> list[str]:
    """``course``: the flight record's; None if it is no longer known."""
    sentences = [
        f"{result.subject.image} is {result.verdict}, as result {result.seq} of {result.finished_at:%Y-%m-%d %H:%M:%S}."
    ]
    route = {step.expert: step for step in graph.routes.get(result.subject.component or "", ())}
    for answer in result.steps:
        step = route.get(answer.expert)
        meaning = _meaning_of_outputs(step, answer.outputs) if step and answer.outputs else None
        meaning = meaning or _meaning(step, answer.label, answer.score)
        sentences.append(f"{answer.expert} answered {answer.label} with {answer.score:.3f}: {meaning}.")
    if result.reason:
        sentences.append(f"The reason: {result.reason}.")
    if result.verdict is Verdict.UNKNOWN and not result.steps:
        sentences.append("No expert judged it.")
    gone = "Its course is not known any more: it was OK and not slow, and the agent has seen many others since."
    return [*sentences, *([gone] if course is None else explained_course(course))]


def explained_course(course: Mapping[str, Any]) -> list[str]:
    """One sentence or several for each step, in seconds since the request's arrival at the agent."""
    sentences = []
    for number, step in enumerate(course["steps"], start=1):
        expert, load, batch = step["expert"], step["load"], step["batch"]
        group = "joined a group" if step["joined"] else "opened a group"
        place = f"executor {step['executor']} ({step['processor']})"
        sentences.append(f"Step {number}, {expert}: after {step['queued_s']:.3f} s it {group} on {place}.")
        if len(step["candidates"]) > 1:
            queues = (
                f"executor {each['executor']} had {each['queue_s']:.3f} s queued and needed {each['addition_s']:.3f} s "
                "more for it" for each in step["candidates"]
            )  # fmt: skip
            sentences.append(f"To choose from: {', '.join(queues)}.")
        if load is not None:
            sentences.append(_load_sentence(expert, load))
        if batch is None:
            sentences.append(f"It waits there for its batch, {course['total_s']:.3f} s after its arrival.")
        else:
            ran = "runs now" if batch["seconds"] is None else f"took {batch['seconds']:.3f} s"
            of = f"batch of {batch['images']}" if batch["images"] > 1 else "batch, of it alone,"
            sentences.append(f"Its {of} began after {batch['began_s']:.3f} s and {ran}.")
    return sentences or ["It has no place in a queue: its expert takes no requests, or no executor can run it now."]


def _load_sentence(expert: str, load: Mapping[str, Any]) -> str:
    took = "is under way" if load["seconds"] is None else f"took {load['seconds']:.3f} s"
    sentence = f"{expert} was not in memory: its load from {load['from']} into {load['to']} {took}"
    if load["failure"] is not None:
        return f"{sentence} and failed: {load['failure']}."
    if not load["evicted"]:
        return f"{sentence}, into free room."
    stages = "; ".join(STAGES[stage] for stage in dict.fromkeys(load["stages"]))
    return f"{sentence}, and {', '.join(load['evicted'])} was evicted for it: {CLAIMS[load['claim']]} ({stages})."


def _under_way(expert: str, agent: Agent) -> list[str]:
    """Memories that the expert is loaded into, and the requests that wait for it."""
    record, name = agent.loop.record, agent.expert(expert)
    sentences = [
        f"Its load from {each.source} into {each.pool} began at {record.wall(each.began_s):%H:%M:%S}."
        for each in record.loading(name)
    ]
    for executor, waiting in sorted(Counter(record.waiting(name)).items()):
        sentences.append(f"Requests that wait for it on executor {executor}: {waiting}.")
    return sentences


def _evictions(expert: str, agent: Agent) -> list[str]:
    record = agent.loop.record
    found = [each for each in record.evictions() if line_name(each.expert) == expert][-EVICTIONS_SHOWN:]
    return [f"{expert} left memory {each.pool} {_why(each, agent)}." for each in reversed(found)]


def _why(eviction: Eviction, agent: Agent) -> str:
    newcomer = f"for {line_name(eviction.for_expert)}, " if eviction.for_expert else ""
    when = f"at {agent.loop.record.wall(eviction.at_s):%H:%M:%S}"
    if not eviction.weighed:
        return f"{when}: {CLAIMS[eviction.claim]}"
    names = [line_name(each) for each in eviction.candidates]
    more = f" and {eviction.weighed - len(names)} more" if eviction.weighed > len(names) else ""
    why = f"{CLAIMS[eviction.claim]}; {STAGES[eviction.stage]}; candidates in order: {', '.join(names)}{more}"
    return f"{when}, {newcomer}as {why}"


def _stays(expert: str, agent: Agent, engine: EngineStatistics) -> list[str]:
    """Why the expert is still in a memory: by the latest eviction there."""
    sentences, name = [], agent.expert(expert)
    for pool in engine.pools:
        if not any(expert_of(copy) == name for copy in pool.resident):
            continue
        if name in agent.setup.limits.pinned:
            sentences.append(f"{expert} is pinned: it stays in memory {pool.name} if that is its home.")
            continue
        last = next((each for each in reversed(agent.loop.record.evictions()) if each.pool == pool.name), None)
        if last is None or last.for_expert == name:
            since = "lately" if last is None else f"since {expert} came at {agent.loop.record.wall(last.at_s):%H:%M:%S}"
            sentences.append(f"Nothing was evicted from memory {pool.name} {since}.")
        elif name in last.candidates:
            rank = last.candidates.index(name) + 1
            left = f"{line_name(last.expert)} left {_why(last, agent)}"
            sentences.append(f"{expert} stays in memory {pool.name}: it was candidate {rank}, and {left}.")
        else:
            left = f"when {line_name(last.expert)} left {_why(last, agent)}"
            sentences.append(
                f"{expert} stays in memory {pool.name}: it ran, was awaited, came later or was used too often to be a "
                f"candidate {left}."
            )
    return sentences


def _seen(expert: str, agent: Agent) -> list[str]:
    seen = agent.loop.record.seen(agent.expert(expert))
    if seen.p50_s is None or seen.p99_s is None:
        return []
    of = f"Images that it ran lately: {seen.images}, batches: {seen.batches}. From queued to answered, half of them"
    if not seen.images:
        of = "From queued to its end, half of its texts lately"
    return [f"{of} took at most {seen.p50_s:.3f} s, 99 of 100 at most {seen.p99_s:.3f} s."]


def _meaning(step: RouteStep | None, label: str, score: float) -> str:
    if step is None:
        return "it is not on the component's route any more"
    if label not in step.passing:
        return f"only {', '.join(sorted(step.passing))} passes"
    if score < step.min_score:
        return f"less than the {step.min_score:g} that its step requires"
    return "passed"


def _meaning_of_outputs(step: RouteStep, outputs: Sequence[LabelScore]) -> str | None:
    """Labels that decided, for multilabel experts; None if the reported label decided."""
    labels = {output.label: output.holds for output in outputs}
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
