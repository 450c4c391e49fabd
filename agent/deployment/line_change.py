"""Change of a running agent to a line file that was read again.

Guarantees: nothing here changes the running agent; a line that cannot be served is a ConfigError. An unchanged expert
keeps its place in memory. A replaced expert gets a new name in the Engine; under its old name it finishes its requests,
and the next change removes it.
"""

from __future__ import annotations

import hashlib
import logging
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from agent.core.events import LineChanged
from agent.core.names import copy_name, expert_of, form_of, line_name, successor_name, with_line_names
from agent.core.performance import HOST, PerformanceMatrix
from agent.deployment.build import AgentOptions, all_alarms, deployment_of, line_parts, line_times
from agent.deployment.deployment import Overrides
from agent.deployment.memory_split import pinned_experts
from agent.deployment.performance_matrix import with_families
from agent.deployment.ranked_experts import ranked_experts, worker_name
from agent.device_profile.identity import verdict_sha256
from agent.runtime.expert_copy import prepared_form
from agent.runtime.machine.box import threads_per_executor
from agent.runtime.weights.skeletons import make_templates
from experts.errors import ConfigError, CoServeError, MemoryExceeded, WeightsMismatch
from experts.expert import Precision
from experts.graph import ExpertGraph
from experts.sizes import mib

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

    from agent.config import LineConfig
    from agent.core.engine import EngineSetup
    from agent.core.performance import ExpertProfile
    from agent.deployment.build import Agent, Progress
    from agent.runtime.expert_copy import ExpertCopy
    from agent.runtime.weights.skeletons import Templates
    from experts.errors import ExpertError
    from experts.packed.weights import PackedExpert

log = logging.getLogger(__name__)

BUSY_S = 10.0  # an unknown kind waits for a moment without requests: arbitrary
LIVE_KEYS = ("experts", "routes", "boards", "require_proof", "golden")  # which a reload takes over; others need a start
LIVE_PARTS = {"texts": "routes", "api": "tokens"}  # section -> its one key that a reload takes over


@dataclass(frozen=True, slots=True)
class LineChange:
    """``copies``: new ones. ``agent``: after the change. ``quarantined``: by the Engine's names, with reasons."""

    agent: Agent
    event: LineChanged
    copies: Mapping[str, ExpertCopy]
    quarantined: Mapping[str, str]
    added: tuple[str, ...]
    replaced: tuple[str, ...]
    removed: tuple[str, ...]


def pair_sha256(config: LineConfig, expert: str, shadow: str) -> str:
    """Digest of the terms by which an expert and its shadow are judged: entries and routes, without weights."""
    both = " ".join(verdict_sha256(config.catalog.graph, config.catalog.experts[name]) for name in (expert, shadow))
    return hashlib.sha256(both.encode()).hexdigest()


def keys_for_restart(old: LineConfig, new: LineConfig) -> tuple[str, ...]:
    before, after = old.document.values, new.document.values
    differing = (key for key in sorted(before.keys() | after.keys()) if _fixed(key, before) != _fixed(key, after))
    return tuple(key for key in differing if key not in LIVE_KEYS)


def _fixed(key: str, values: Mapping[str, Any]) -> object:
    live = LIVE_PARTS.get(key)
    if live is None:
        return values.get(key)
    return {name: value for name, value in (values.get(key) or {}).items() if name != live}


def taken_over(old: LineConfig, new: LineConfig) -> LineConfig:
    """Configuration after a reload: what LIVE_KEYS and LIVE_PARTS name is new, all else as at the start."""
    api = old.api.model_copy(update={"tokens": new.api.tokens})
    names = ("experts", "routes", "catalog", "boards", "layouts", "document", "promotions", "require_proof", "golden")
    return old.model_copy(update={name: getattr(new, name) for name in names} | {"api": api})


def plan_change(agent: Agent, config: LineConfig, progress: Progress) -> LineChange:
    """Pack and measure new experts; may take minutes. Raises ConfigError, also for a lack of memory or disk."""
    try:
        return _planned(agent, config, progress)
    except ConfigError:
        raise
    except (CoServeError, OSError) as error:
        raise ConfigError(
            f"new experts cannot be prepared beside the running ones: {with_line_names(str(error))} - correct that and "
            "reload, or restart"
        ) from error


def _planned(agent: Agent, config: LineConfig, progress: Progress) -> LineChange:
    if lost := ", ".join(agent.loop.lost):
        raise ConfigError(
            f"{lost} is lost, and new experts cannot be measured there - reload once it is back, or restart"
        )
    local = agent.setup.at("")
    overrides = Overrides(executors=local.executors, pools=local.pools)
    plan = deployment_of(config, agent.segments.directory, AgentOptions(overrides=overrides))
    if plan.profile is not None:  # its proofs of decoding are of the old experts of these names
        plan = replace(plan, profile=replace(plan.profile, decodings=()))
    _refuse_new_ranks(agent, config)
    parts = line_parts(agent.workers, plan, agent.segments, progress, agent.packed.values())
    for part in parts.values():
        _refuse_unfitting(agent, config, part.unpacked)
    copies = [copy for part in parts.values() for copy in part.all_copies]
    names = _names(agent, config, copies)

    def of_new(listed: Iterable[ExpertCopy]) -> list[ExpertCopy]:
        return [copy for copy in listed if names[copy.expert.id] not in _served(agent)]

    here = parts[""]
    known = _known_rows(agent)
    new = {processor: of_new(listed) for processor, listed in here.copies.items()}
    unknown = [copy for processor, listed in new.items() for copy in listed if known(processor, copy) is None]
    with _room_to_measure(agent, unknown):
        times = line_times(agent.workers, parts, agent.segments, progress, of_new, known)
    local_times = times.pop("")
    found = here.setup(local_times.matrix, local_times.failed)
    for worker, theirs in times.items():
        found = found.with_columns(worker, theirs.matrix.experts, theirs.failed)
    threads = threads_per_executor(agent.box, local.executors)
    templates = make_templates(new, agent.segments, threads, lambda done, total: progress("templates", done, total))
    fresh: dict[str, ExpertCopy] = {}
    for copy in of_new(copies):
        name = copy_name(names[copy.expert.id], Precision(copy.packed.precision))
        fresh[name] = replace(copy, name=name)
    setup = _setup_after(agent, config, names, found, here.usage, fresh)
    broken = dict(templates.failed) | dict(found.broken)
    setup = replace(setup, broken={names[name]: reason for name, reason in broken.items() if name in names})
    return _change(replace(agent, alarms=all_alarms(parts)), config, names, setup, fresh, templates)


def _known_rows(agent: Agent) -> Callable[[str, ExpertCopy], ExpertProfile | None]:
    """Rows of served experts, for new experts of the same kind, form and processor.

    They are not measured: beside running batches and full memories their times would be too high.
    """
    rows = {
        (processor, copy.kind, copy.packed.precision, copy.moe_places): (row, copy)
        for processor, column in agent.setup.matrix.experts.items()
        for row in column.values()
        for copy in [agent.copies[row.copy]]
    }

    def known(processor: str, copy: ExpertCopy) -> ExpertProfile | None:
        found = rows.get((processor, copy.kind, copy.packed.precision, copy.moe_places))
        if found is None:
            return None
        row, like = found
        load_s = {tier: seconds * copy.loaded_bytes / like.loaded_bytes for tier, seconds in row.load_s.items()}
        form = prepared_form(copy.expert)
        return replace(row, copy=copy.name, footprint=copy.footprint, load_s=load_s, prepared=form)

    return known


@contextmanager
def _room_to_measure(agent: Agent, unknown: Collection[ExpertCopy]) -> Iterator[None]:
    """A moment without requests, or BUSY_S, and room in the host memory for the largest of these copies."""
    if not unknown:
        yield
        return
    names = ",".join(sorted({copy.expert.id for copy in unknown}))
    if not agent.loop.wait_until_drained(BUSY_S):
        log.warning("measured_beside_work experts=%s", names)
    largest_bytes = max(copy.footprint.total_bytes for copy in unknown)
    with agent.loop.reserving(HOST, largest_bytes) as reserved_bytes:
        if reserved_bytes < largest_bytes:
            log.warning("measured_beside_budget experts=%s beside=%s", names, mib(largest_bytes - reserved_bytes))
        yield


def _refuse_new_ranks(agent: Agent, config: LineConfig) -> None:
    """A model's ranks are a worker, and workers are those of the start."""
    for expert in ranked_experts(config):
        if worker_name(expert.id) not in agent.setup.workers:
            raise config.document.error(
                "processes of a model come with a start - restart", "experts", expert.id, "parallel"
            )


def _refuse_unfitting(agent: Agent, config: LineConfig, failed: Mapping[str, ExpertError]) -> None:
    """Refuse weights that no longer fit their line, for example with labels in another order."""
    if problems := [
        config.document.error(str(error), "experts", name)
        for name, error in failed.items()
        if isinstance(error, WeightsMismatch) and agent.expert(name) not in agent.setup.broken
    ]:
        raise ConfigError.of(problems)


def _setup_after(
    agent: Agent,
    config: LineConfig,
    names: Mapping[str, str],
    found: EngineSetup,
    usage: Mapping[str, float],
    fresh: Mapping[str, ExpertCopy],
) -> EngineSetup:
    """Setup after the change. Raises ConfigError for experts that do not fit."""
    retired = (_served(agent) | _unfinished(agent)) - set(names.values())
    copies = (dict(agent.copies) | dict(fresh)).values()
    served = [copy for copy in copies if expert_of(copy.name) in names.values()]
    setup = replace(
        agent.setup,
        graph=_graph(config, names, retired),
        matrix=with_families(_matrix(agent, found, names, usage), served),
        limits=replace(
            agent.setup.limits,
            pinned=frozenset(names[name] for name in pinned_experts(config)),
            placement=_placement(agent, names),
        ),
        precisions=found.precisions,
    )
    _refuse_without_leases(setup, agent.loop.text_executors)
    try:
        setup.engine()
    except MemoryExceeded as error:
        reason = with_line_names(str(error))
        raise ConfigError(f"{reason} - restart with a larger memory:, or remove the expert") from error
    return setup


def _change(
    agent: Agent,
    config: LineConfig,
    names: Mapping[str, str],
    setup: EngineSetup,
    fresh: Mapping[str, ExpertCopy],
    templates: Templates,
) -> LineChange:
    all_copies = dict(agent.copies) | dict(fresh)
    by_copy = {name: copy for name, copy in all_copies.items() if expert_of(copy.name) in setup.graph.experts}
    retired = setup.graph.experts - set(names.values())
    columns = setup.matrix.experts.items()
    held = {processor: [by_copy[row.copy] for row in column.values()] for processor, column in columns}
    after = replace(
        agent,
        config=config,
        setup=setup,
        packed={copy.name: copy.packed for listed in held.values() for copy in listed},
        templates=agent.templates.after(templates, held),
        copies=by_copy,
        experts=names,
        retired=retired,
        changes=agent.changes + 1,
        earlier_names=agent.earlier_names | agent.config.catalog.experts.keys(),
    )
    before = {line_name(name) for name in _served(agent)}
    return LineChange(
        after,
        LineChanged(setup.graph, setup.matrix, setup.limits.pinned, retired, setup.limits.placement),
        fresh,
        setup.broken,
        added=tuple(sorted(names.keys() - before)),
        replaced=tuple(sorted(name for name in names.keys() & before if names[name] not in _served(agent))),
        removed=tuple(sorted(before - names.keys())),
    )


def _placement(agent: Agent, names: Mapping[str, str]) -> dict[str, frozenset[str]]:
    """Places of the Engine's experts: a replaced expert's for its successor; none for a new one."""
    placement = agent.setup.limits.placement
    old = {line_name(name): pools for name, pools in placement.items()}
    return {**placement, **{names[name]: pools for name, pools in old.items() if name in names}}


def _unfinished(agent: Agent) -> set[str]:
    """Retired experts that accepted requests may need, or whose copies are in a memory."""
    engine = agent.loop.statistics().engine
    if engine.serves_earlier_lines:
        return set(agent.retired)
    there = {expert_of(copy) for pool in engine.pools for copy in (*pool.resident, *pool.loading)}
    return set(agent.retired & there)


def _served(agent: Agent) -> frozenset[str]:
    return agent.setup.graph.experts - agent.retired


def _names(agent: Agent, config: LineConfig, copies: Iterable[ExpertCopy]) -> dict[str, str]:
    """The Engine's name of each expert of the new line: the present one, if entry and packed weights are unchanged."""
    names = {}
    known = agent.earlier_names | agent.config.catalog.experts.keys()
    served_forms: defaultdict[str, dict[str, PackedExpert]] = defaultdict(dict)
    new_forms: defaultdict[str, dict[str, PackedExpert]] = defaultdict(dict)
    for copy in agent.copies.values():
        served_forms[expert_of(copy.name)][copy.packed.precision] = copy.packed
    for copy in copies:
        new_forms[copy.expert.id][copy.packed.precision] = copy.packed
    for name, expert in config.catalog.experts.items():
        present = agent.expert(name)
        is_same = agent.config.catalog.experts.get(name) == expert and new_forms[name] == served_forms[present]
        if is_same and name in agent.loop.scaled:  # smaller JPEGs are proven for its routes
            before, after = (verdict_sha256(each.catalog.graph, expert) for each in (agent.config, config))
            is_same = before == after
        number = agent.changes + 2  # the start's names are the first generation
        fresh = successor_name(name, number) if name in known else name
        names[name] = present if is_same and present in _served(agent) else fresh
    return names


def _matrix(
    agent: Agent, found: EngineSetup, names: Mapping[str, str], usage: Mapping[str, float]
) -> PerformanceMatrix:
    """Old rows that may still be needed, and new rows under the Engine's names."""
    is_behind = agent.loop.statistics().engine.serves_earlier_lines
    kept = (agent.setup.graph.experts if is_behind else _served(agent)) | set(names.values())
    columns: dict[str, dict[str, ExpertProfile]] = {
        processor: {name: row for name, row in column.items() if name in kept}
        for processor, column in agent.setup.matrix.experts.items()
    }
    for processor, column in found.matrix.experts.items():
        for name, row in column.items():
            precision = form_of(row.copy)
            columns[processor][names[name]] = replace(row, copy=copy_name(names[name], Precision(precision)))
    return PerformanceMatrix(columns, {names[name]: share for name, share in usage.items() if name in names})


def _graph(config: LineConfig, names: Mapping[str, str], retired: frozenset[str]) -> ExpertGraph:
    routes = {
        component: tuple(step.renamed(names) for step in steps)
        for component, steps in config.catalog.graph.routes.items()
    }
    shadows = {names[expert]: names[shadow] for expert, shadow in config.catalog.graph.shadows.items()}
    return ExpertGraph([*names.values(), *retired], routes, shadows)


def _refuse_without_leases(setup: EngineSetup, text_executors: Collection[int]) -> None:
    """Memory for keys and values is taken at the start, for the language models of that time."""
    leases = {pool.name: pool.lease_bytes for pool in setup.pools}
    for spec in setup.executors:
        for name, row in setup.matrix.experts.get(spec.processor, {}).items():
            has_none = row.performance.runs_in_quanta and spec.id not in text_executors
            if has_none or row.performance.lease_bytes > leases[spec.pool]:
                raise ConfigError(
                    f"{line_name(name)} takes texts, and no memory was kept for their keys and values when the agent "
                    "started - restart it"
                )
