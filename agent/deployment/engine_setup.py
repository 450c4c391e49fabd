"""What an agent of a line would decide with, by a device profile: no weights are touched, nothing is run or detected.

Guarantees: the same choices as ``build_agent`` makes for the same line, box and profile, for they are made by the same
functions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from agent.core.performance import DEVICE, HOST
from agent.deployment.executors import executor_specs
from agent.deployment.memory_split import available_for, limits_of, pool_specs
from agent.deployment.packed_copies import by_precision, copies_of, lying_packed
from agent.deployment.performance_matrix import matrix, unmeasured_kinds
from agent.deployment.profile_in_use import precisions_of, programs_of, usage_of
from agent.runtime.expert_copy import kind_name
from agent.runtime.machine.box import Box, MemorySize
from experts.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from agent.config import LineConfig, PolicyName
    from agent.core.performance import ExecutorSpec, Limits, PerformanceMatrix, PoolSpec
    from agent.deployment.packed_copies import Precisions
    from agent.device_profile.records import StoredProfile
    from experts.expert import Precision
    from experts.weights import PackedExpert


@dataclass(frozen=True, slots=True)
class Planned:
    """What an agent of a line would decide with. ``broken``: experts that it would not serve, and why."""

    executors: tuple[ExecutorSpec, ...]
    pools: tuple[PoolSpec, ...]
    matrix: PerformanceMatrix
    limits: Limits
    precisions: Precisions
    broken: Mapping[str, str]


def planned(
    config: LineConfig,
    box: Box,
    profile: StoredProfile,
    *,
    policy: PolicyName | None = None,
    memory: Mapping[str, int] | None = None,
    executors: Sequence[ExecutorSpec] | Mapping[str, int] | None = None,
    precision: Precision | None = None,
    pools: Sequence[PoolSpec] | None = None,
    without: Mapping[str, str] = MappingProxyType({}),
) -> Planned:
    """What an agent of this line on this box would decide with, by this profile; nothing but manifests is read.

    ``policy``, ``memory`` (bytes by host, device and workspace), ``executors`` and ``precision`` stand in the place of
    the line file's; ``pools`` of the whole split. ``without``: experts that are known not to be servable, and why.
    Raises ConfigError, naming them, for experts that are not packed or whose kind was not profiled.
    """
    counts, given = (executors, None) if isinstance(executors, Mapping) else (None, executors)
    wanted = _overridden(config, policy, memory, counts, precision)
    lying = lying_packed(wanted, wanted.packed_folder)
    specs = tuple(given) if given else executor_specs(wanted, box, profile.allocation)
    programs = programs_of(lying)
    kinds = {name: kind_name(wanted.catalog.experts[name], program) for name, program in programs.items()}
    precisions = precisions_of(wanted, [spec.processor for spec in specs], profile, programs)
    packed = by_precision(lying)
    copies = copies_of(wanted, precisions, {name: forms for name, forms in packed.items() if name not in without})
    to_run = _to_run(precisions, profile, kinds)
    _refuse_unpacked(wanted, to_run, packed, without, is_asked=wanted.precision != config.precision)
    found = matrix(profile, box, copies, usage_of(wanted, profile), specs)
    broken = unmeasured_kinds(found, kinds) | dict(without)
    _refuse_unprofiled(wanted, profile, broken.keys() - without.keys())
    shares = tuple(pools or pool_specs(wanted, box, specs, found, profile.allocation))
    return Planned(specs, shares, found, limits_of(wanted, shares), precisions, broken)


def profiled_box(profile: StoredProfile) -> Box:
    """The box that a profile was measured on, with as much memory available as its allocation shares out."""
    identity, budgets = profile.box, profile.allocation.budget_bytes

    def size(pool: str, total_bytes: int) -> MemorySize:
        return MemorySize(total_bytes, available_for(pool, budgets[pool]) if pool in budgets else total_bytes)

    device = None if identity.device_bytes is None else size(DEVICE, identity.device_bytes)
    versions = tuple(identity.versions.items())
    host = size(HOST, identity.host_bytes)
    return Box(identity.device, identity.model, identity.processors, identity.cores, host, device, versions)


def _overridden(
    config: LineConfig,
    policy: PolicyName | None,
    memory: Mapping[str, int] | None,
    executors: Mapping[str, int] | None,
    precision: Precision | None,
) -> LineConfig:
    unknown = sorted(set(memory or {}) - set(type(config.memory).model_fields))
    if unknown:
        raise ConfigError(f"no memory is called {', '.join(unknown)} - use host, device or workspace")
    return replace(
        config,
        policy=policy or config.policy,
        memory=config.memory.model_copy(update=dict(memory or {})),
        executors=config.executors if executors is None else executors,
        precision=precision or config.precision,
    )


def _to_run(precisions: Precisions, profile: StoredProfile, kinds: Mapping[str, str]) -> Precisions:
    """``precisions`` without those of kinds that the profile chose nothing for on a processor, as they fail there.

    The matrix has no row for these. ``kinds``: of experts that are packed; of others they may not be known.
    """
    return {
        processor: {
            name: form
            for name, form in column.items()
            if name not in kinds or (kinds[name], processor) in profile.precisions
        }
        for processor, column in precisions.items()
    }


def _refuse_unpacked(
    config: LineConfig,
    precisions: Precisions,
    packed: Mapping[str, Mapping[Precision, PackedExpert]],
    without: Mapping[str, str],
    *,
    is_asked: bool,
) -> None:
    """``is_asked``: another precision than the line file's is, which profiling would not pack."""
    profiling = f"`coserve profile {config.document.file}`"
    wanted = {(name, form) for column in precisions.values() for name, form in column.items() if name not in without}
    problems = [
        config.document.error(
            f"not packed in {form} - write `precision: {form}` into the line file, then run {profiling}"
            if is_asked and form == config.precision
            else f"not packed in {form} - run {profiling}, which packs it",
            "experts",
            name,
        )
        for name, form in sorted(wanted)
        if form not in packed.get(name, {})
    ]
    if problems:
        raise ConfigError.of(problems)


def _refuse_unprofiled(config: LineConfig, profile: StoredProfile, unmeasured: Iterable[str]) -> None:
    """An expert without a row is broken if the profiler knew it, and new if it did not."""
    known = {expert for expert, _ in profile.packed}
    problems = [
        config.document.error(
            f"the device profile has no times of its kind - run `coserve profile {config.document.file}`",
            "experts",
            name,
        )
        for name in sorted(unmeasured)
        if name not in known
    ]
    if problems:
        raise ConfigError.of(problems)
