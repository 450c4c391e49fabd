"""A line file that was read anew, and what an agent that runs has to do to serve it.

Guarantees: nothing of the running agent is changed here; what cannot be served as it should is a ConfigError, and the
agent goes on as it was. An expert that is the same, down to its packed bytes, keeps its place in memory; one that was
replaced is another one to the Engine, under a name of its own, and the old one finishes what it was asked. Of one that
has finished nothing is kept but its name: no packed file, and no room beside the others.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from agent.core.events import LineChanged
from agent.core.performance import PerformanceMatrix
from agent.deployment.build import AgentOptions, groundwork_of, measured_setup, pack
from agent.deployment.engine_setup import Given
from agent.deployment.families import with_families
from agent.deployment.packed_copies import copies_of, copy_name
from agent.deployment.profile_in_use import refuse_mismatches
from agent.runtime.machine.box import threads_per_executor
from agent.runtime.templates import Templates, make_templates
from experts.errors import ConfigError, CoServeError, MemoryExceeded
from experts.expert import Precision
from experts.graph import ExpertGraph

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from agent.config import LineConfig
    from agent.core.performance import ExpertProfile
    from agent.deployment.build import Agent, Progress
    from agent.deployment.engine_setup import EngineSetup
    from agent.runtime.expert_copy import ExpertCopy

GENERATION = "+"  # between an expert's name and how often it was replaced, in the Engine's names; in no line file's
LIVE_KEYS = ("experts", "routes", "boards")
TEXTS = "texts"
GENERATIONS = re.compile(r"\+[0-9]+(?![\w.+-])")


@dataclass(frozen=True, slots=True)
class LineChange:
    """What is to be done: the event for the Engine, the copies that are new to the loop, and the agent as it is then.

    ``quarantined``: experts by the Engine's names that cannot be served, and why.
    """

    agent: Agent
    event: LineChanged
    copies: Mapping[str, ExpertCopy]
    quarantined: Mapping[str, str]
    added: tuple[str, ...]
    replaced: tuple[str, ...]
    removed: tuple[str, ...]


def line_name(expert: str) -> str:
    """What the line file calls an expert that the Engine calls so."""
    return expert.partition(GENERATION)[0]


def with_line_names(text: str) -> str:
    """A message of the Engine's with the line file's names in it."""
    return GENERATIONS.sub("", text) if GENERATION in text else text


def keys_for_restart(old: LineConfig, new: LineConfig) -> tuple[str, ...]:
    """The sections that differ, and that a running agent cannot take over."""
    before, after = old.document.values, new.document.values
    differing = (key for key in sorted(before.keys() | after.keys()) if _fixed(key, before) != _fixed(key, after))
    return tuple(key for key in differing if key not in LIVE_KEYS)


def _fixed(key: str, values: Mapping[str, Any]) -> object:
    """What a section says, without the routes of texts, which are taken over as those of images are."""
    if key != TEXTS:
        return values.get(key)
    return {name: value for name, value in (values.get(key) or {}).items() if name != "routes"}


def taken_over(old: LineConfig, new: LineConfig) -> LineConfig:
    """The old line with what of the new one a running agent can take over."""
    return replace(old, catalog=new.catalog, boards=new.boards, layouts=new.layouts, document=new.document)


def plan_change(agent: Agent, config: LineConfig, progress: Progress) -> LineChange:
    """Pack and measure what is new of ``config``, and say how the agent changes over to it; takes as long as that does.

    Raises ConfigError for what must not be served, and for what there is no memory or no room on the drive to prepare
    beside what runs.
    """
    try:
        return _planned(agent, config, progress)
    except ConfigError:
        raise
    except (CoServeError, OSError) as error:
        raise ConfigError(
            f"what is new cannot be prepared beside what runs: {with_line_names(str(error))} - mend that and reload, "
            "or start anew"
        ) from error


def _planned(agent: Agent, config: LineConfig, progress: Progress) -> LineChange:
    given = Given(executors=agent.setup.executors, pools=agent.setup.pools)
    ground = groundwork_of(config, agent.segments.directory, AgentOptions(given=given))
    report = pack(config, agent.segments, ground.precisions, progress, agent.packed.values())
    copies = copies_of(config, ground.precisions, report.packed)
    if ground.profile is not None:
        together = [copy.packed for listed in copies.values() for copy in listed]
        refuse_mismatches(config, ground.profile, ground.box, together)
    names = _names(agent, config, copies)
    new = {
        processor: [copy for copy in listed if names[copy.expert.id] not in _served(agent)]
        for processor, listed in copies.items()
    }
    found = measured_setup(ground, new, agent.segments, progress)
    threads = threads_per_executor(agent.box, agent.setup.executors)
    templates = make_templates(new, agent.segments, threads, lambda done, total: progress("templates", done, total))
    fresh = _renamed(new, names)
    setup = _setup_after(agent, config, names, found, ground.usage, fresh)
    unpacked = {name: error.message for name, error in report.failed.items()}
    broken = dict(templates.failed) | unpacked | dict(found.broken)
    setup = replace(setup, broken={names[name]: reason for name, reason in broken.items() if name in names})
    return _change(agent, config, names, setup, fresh, templates)


def _setup_after(
    agent: Agent,
    config: LineConfig,
    names: Mapping[str, str],
    found: EngineSetup,
    usage: Mapping[str, float],
    fresh: Mapping[str, ExpertCopy],
) -> EngineSetup:
    """What the Engine decides with from then on. Raises ConfigError for what does not fit."""
    retired = (_served(agent) | agent.retired) - set(names.values())
    setup = replace(
        agent.setup,
        graph=_graph(config, names, retired),
        matrix=with_families(_matrix(agent, found, names, usage), [*agent.copies.values(), *fresh.values()], fresh),
        limits=replace(agent.setup.limits, pinned=frozenset(names[name] for name in _pinned(config))),
        precisions=found.precisions,
    )
    _refuse_without_leases(setup)
    _refuse_misfits(setup)
    return setup


def _change(
    agent: Agent,
    config: LineConfig,
    names: Mapping[str, str],
    setup: EngineSetup,
    fresh: Mapping[str, ExpertCopy],
    templates: Templates,
) -> LineChange:
    by_copy = dict(agent.copies) | dict(fresh)
    retired = setup.graph.experts - set(names.values())
    rows = (row for column in setup.matrix.experts.values() for row in column.values())
    after = replace(
        agent,
        config=config,
        setup=setup,
        packed={row.copy: by_copy[row.copy].packed for row in rows},
        templates=Templates((*agent.templates.held, *templates.held), templates.failed),
        copies=by_copy,
        experts=names,
        retired=retired,
    )
    before = {line_name(name) for name in _served(agent)}
    return LineChange(
        after,
        LineChanged(setup.graph, setup.matrix, setup.limits.pinned, retired),
        fresh,
        setup.broken,
        added=tuple(sorted(names.keys() - before)),
        replaced=tuple(sorted(name for name in names.keys() & before if names[name] not in _served(agent))),
        removed=tuple(sorted(before - names.keys())),
    )


def _renamed(new: Mapping[str, Sequence[ExpertCopy]], names: Mapping[str, str]) -> dict[str, ExpertCopy]:
    """The copies by the Engine's names."""
    renamed = {
        copy_name(names[copy.expert.id], Precision(copy.packed.precision)): copy
        for listed in new.values()
        for copy in listed
    }
    return {name: replace(copy, name=name) for name, copy in renamed.items()}


def _needed(agent: Agent) -> frozenset[str]:
    """The Engine's names of the experts that what was accepted may still have to be asked."""
    is_behind = agent.loop.statistics().engine.serves_earlier_lines
    return agent.setup.graph.experts if is_behind else _served(agent)


def _served(agent: Agent) -> frozenset[str]:
    """The Engine's names of the experts of the line as it is."""
    return agent.setup.graph.experts - agent.retired


def _names(agent: Agent, config: LineConfig, copies: Mapping[str, Sequence[ExpertCopy]]) -> dict[str, str]:
    """The Engine's name of each expert of the new line: the old one's where it is the same."""
    names = {}
    for name, expert in config.catalog.experts.items():
        now = agent.expert(name)
        then = {copy.packed.precision: copy.packed for copy in agent.copies.values() if copy.name.startswith(f"{now}@")}
        lies = {copy.packed.precision: copy.packed for copy in _of(name, copies)}
        is_same = agent.config.catalog.experts.get(name) == expert and lies == then
        names[name] = now if is_same and now in _served(agent) else _next_name(name, agent)
    return names


def _of(name: str, copies: Mapping[str, Sequence[ExpertCopy]]) -> Iterable[ExpertCopy]:
    return (copy for listed in copies.values() for copy in listed if copy.expert.id == name)


def _next_name(name: str, agent: Agent) -> str:
    """One that the Engine has never heard."""
    taken = agent.setup.graph.experts | agent.retired
    if name not in taken:
        return name
    number = 2
    while f"{name}{GENERATION}{number}" in taken:
        number += 1
    return f"{name}{GENERATION}{number}"


def _matrix(
    agent: Agent, found: EngineSetup, names: Mapping[str, str], usage: Mapping[str, float]
) -> PerformanceMatrix:
    """The old rows as far as they may still be needed, and those of what is new under the Engine's names."""
    kept = _needed(agent) | set(names.values())
    columns: dict[str, dict[str, ExpertProfile]] = {
        processor: {name: row for name, row in column.items() if name in kept}
        for processor, column in agent.setup.matrix.experts.items()
    }
    for processor, column in found.matrix.experts.items():
        for name, row in column.items():
            precision = row.copy.rpartition("@")[2]
            columns[processor][names[name]] = replace(row, copy=copy_name(names[name], Precision(precision)))
    return PerformanceMatrix(columns, {names[name]: share for name, share in usage.items() if name in names})


def _graph(config: LineConfig, names: Mapping[str, str], retired: frozenset[str]) -> ExpertGraph:
    routes = {
        component: tuple(step.renamed(names) for step in steps)
        for component, steps in config.catalog.graph.routes.items()
    }
    shadows = {names[expert]: names[shadow] for expert, shadow in config.catalog.graph.shadows.items()}
    return ExpertGraph([*names.values(), *retired], routes, shadows)


def _pinned(config: LineConfig) -> Iterable[str]:
    return (name for name, expert in config.catalog.experts.items() if expert.pin)


def _refuse_misfits(setup: EngineSetup) -> None:
    try:
        setup.engine()
    except MemoryExceeded as error:
        reason = with_line_names(str(error))
        raise ConfigError(f"{reason} - start anew with a larger memory:, or leave the expert out") from error


def _refuse_without_leases(setup: EngineSetup) -> None:
    """Memory for keys and values is taken at the start, by agents that have language models then."""
    leases = {pool.name: pool.lease_bytes for pool in setup.pools}
    for spec in setup.executors:
        for name, row in setup.matrix.experts.get(spec.processor, {}).items():
            if row.performance.lease_bytes > leases[spec.pool]:
                raise ConfigError(
                    f"{line_name(name)} takes texts, and no memory was kept for their keys and values when the agent "
                    "started - start anew"
                )
