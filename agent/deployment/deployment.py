"""Deployment of a line on a box, or on a worker's part of one: executors, precisions, memories, and packed copies.

Guarantees: serving and planning use the same functions, and so decide alike. Only manifests are read; nothing runs.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import chain
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeAlias

from agent.core.engine import EngineSetup
from agent.core.performance import DEVICE, HOST, PerformanceMatrix
from agent.deployment.executors import executor_specs
from agent.deployment.memory_split import available_for, limits_of, pool_specs, texts_where_they_fit
from agent.deployment.moe_caches import MoeCaches
from agent.deployment.packed_copies import by_precision, copies_of, packed_experts, with_forms
from agent.deployment.performance_matrix import in_form, matrix, unmeasured, with_families
from agent.deployment.profile_in_use import precision_of, programs_of, usage_of
from agent.runtime.expert_copy import kind_name
from agent.runtime.machine.box import Box, MemorySize
from experts.backends.forms import form_of
from experts.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from agent.config import LineConfig
    from agent.core.performance import ExecutorSpec, PoolSpec
    from agent.deployment.packed_copies import Precisions
    from agent.device_profile.records import Allocation, StoredProfile
    from agent.runtime.expert_copy import ExpertCopy
    from experts.errors import ExpertError
    from experts.expert import Precision
    from experts.packed.weights import PackedExpert

Copies: TypeAlias = "Mapping[str, Sequence[ExpertCopy]]"  # by processor
NOTHING: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Overrides:
    """Values that replace those of line file and profile; None: theirs. ``form``: precision to plan experts of images
    in, if their kind was measured in it. For keys of a line file see ``LineConfig.having``."""

    executors: Sequence[ExecutorSpec] | None = None
    pools: Sequence[PoolSpec] | None = None
    usage: Mapping[str, float] | None = None
    form: Precision | None = None


AS_CONFIGURED = Overrides()


@dataclass(frozen=True, slots=True)
class Deployment:
    """Decisions for a line on one box, or for a worker's part of it; then what was packed by them.

    ``alarms``: why the profile is not used, or not for all experts. ``pools``: if overridden. ``changed``: experts that
    differ from the profile, and how; not compared if ``takes_any``. ``copies``: packed ones; ``unpacked``: experts that
    could not be packed.
    """

    config: LineConfig
    box: Box
    profile: StoredProfile | None
    executors: tuple[ExecutorSpec, ...]
    precisions: Precisions
    usage: Mapping[str, float]
    pools: Sequence[PoolSpec] | None
    alarms: tuple[str, ...] = ()
    changed: Mapping[str, str] = field(default_factory=dict)
    takes_any: bool = True
    processes: int = 1  # that share the box, with as many executors each
    copies: Copies = field(default_factory=dict)
    unpacked: Mapping[str, ExpertError] = field(default_factory=dict)

    @property
    def all_copies(self) -> list[ExpertCopy]:
        return [copy for listed in self.copies.values() for copy in listed]

    def sized(self, copies: Copies, times: Callable[[Copies], PerformanceMatrix]) -> Copies:
        """The copies of language models only where they fit, if they fit anywhere; with as many moe_experts as there is
        room for, unless memories are given."""
        if self.pools is None:
            copies = MoeCaches(self.config, self.box, self.executors, self._allocation, times).sized(copies)
        if len({self.box.pool_of(processor) for processor in copies}) < 2:
            return copies
        # by the line's own memories: given ones may have kept no room for keys and values
        return texts_where_they_fit(self.config, self.box, self.executors, copies, times(copies), self._allocation)

    def setup(self, times: PerformanceMatrix, broken: Mapping[str, str] = NOTHING) -> EngineSetup:
        """The setup by these times. Raises ConfigError naming each expert that can never fit."""
        config = self.config
        if not self.executors:
            return EngineSetup(config.catalog.graph, config.policy, (), times, limits_of(config, ()))
        pools = tuple(self.pools or pool_specs(config, self.box, self.executors, times, self._allocation))
        limits = limits_of(config, pools)
        return EngineSetup(config.catalog.graph, config.policy, self.executors, times, limits, self.precisions, broken)

    @property
    def _allocation(self) -> Allocation | None:
        return None if self.profile is None else self.profile.allocation


def decided(
    config: LineConfig,
    box: Box,
    profile: StoredProfile | None,
    packed: Sequence[PackedExpert],
    overrides: Overrides = AS_CONFIGURED,
) -> Deployment:
    """Decisions by line file and profile. ``packed``: experts packed so far, by program for ONNX graphs.
    Raises ConfigError for a processor that the box does not have."""
    allocation = None if profile is None else profile.allocation
    executors = overrides.executors
    if executors is None:
        executors = executor_specs(config, box, allocation, None if profile is None else profile.graphs)
    programs = programs_of(packed)  # kinds of ONNX graphs differ by program
    precisions = {
        processor: {
            name: precision_of(config, name, processor, profile, programs.get(name)) for name in config.catalog.experts
        }
        for processor in dict.fromkeys(spec.processor for spec in executors)
    }
    usage = overrides.usage or usage_of(config, profile)
    return Deployment(config, box, profile, tuple(executors), precisions, usage, overrides.pools)


def planned(
    config: LineConfig,
    box: Box,
    profile: StoredProfile,
    overrides: Overrides = AS_CONFIGURED,
    without: Mapping[str, str] = NOTHING,
) -> EngineSetup:
    """Setup of an agent of this line on this box, by this profile and the packed experts. ``without``: experts not
    servable, and why. Raises ConfigError for other experts that are not packed, or whose kind was not profiled."""
    again = f"run `coserve profile {config.document.file}`"
    found = packed_experts(config, config.packed_folder)
    packed = by_precision(found)
    kinds = {name: kind_name(config.catalog.experts[name], program) for name, program in programs_of(found).items()}
    plan = decided(config, box, profile, found, overrides)
    plan = replace(plan, precisions=_as_packed(config, plan.precisions, packed))
    _refuse_unpacked(config, _to_run(plan.precisions, profile, kinds), packed, without)
    able = {name: forms for name, forms in packed.items() if name not in without}
    copies = plan.sized(
        copies_of(config, plan.precisions, able),
        lambda copies: matrix(profile, box, copies, plan.usage, plan.executors),
    )
    times = matrix(profile, box, copies, plan.usage, plan.executors)
    if overrides.form is not None:
        times = in_form(times, profile, overrides.form, kinds, plan.executors)
    times = with_families(times, chain.from_iterable(copies.values()))
    broken = unmeasured(times, kinds) | dict(without)
    known = {expert for expert, _ in profile.packed}  # without a row, a known expert is broken, not new
    if problems := [
        config.document.error(f"the device profile has no times of its kind - {again}", "experts", name)
        for name in sorted(broken.keys() - without.keys() - known)
    ]:
        raise ConfigError.of(problems)
    return plan.setup(times, broken)


def profiled_box(profile: StoredProfile) -> Box:
    """The box of a profile, with the memory that its allocation shares out."""
    identity, budgets = profile.box, profile.allocation.budget_bytes

    def size(pool: str, total_bytes: int) -> MemorySize:
        return MemorySize(total_bytes, available_for(pool, budgets) if pool in budgets else total_bytes)

    device = None if identity.device_bytes is None else size(DEVICE, identity.device_bytes)
    versions = tuple(identity.versions.items())
    host = size(HOST, identity.host_bytes)
    named = Box(identity.device, identity.model, identity.processors, identity.cores, host, device, versions)
    return replace(named, cpu=identity.cpu, drive=identity.drive)


def _as_packed(
    config: LineConfig, precisions: Precisions, packed: Mapping[str, Mapping[Precision, PackedExpert]]
) -> Precisions:
    """The precisions, with torch's form for experts that profiling did not pack in the line file's form."""
    given = config.precision
    if given is None or config.document.values.get("precision") != given:
        return precisions
    plain = form_of(given).plain
    lacking = {name for name, forms in packed.items() if plain in forms and given not in forms}
    return with_forms(precisions, lambda name, wanted: plain if wanted is given and name in lacking else wanted)


def _to_run(precisions: Precisions, profile: StoredProfile, kinds: Mapping[str, str]) -> Precisions:
    """The precisions without pairs that the profile chose none for: there the expert fails. ``kinds``: kinds of packed
    experts."""
    return {
        processor: {
            name: form
            for name, form in column.items()
            if name not in kinds or (name, processor) in profile.forms or (kinds[name], processor) in profile.precisions
        }
        for processor, column in precisions.items()
    }


def _refuse_unpacked(
    config: LineConfig,
    precisions: Precisions,
    packed: Mapping[str, Mapping[Precision, PackedExpert]],
    without: Mapping[str, str],
) -> None:
    """Profiling packs in the line file's precision: another one must be written there first."""
    profiling = f"`coserve profile {config.document.file}`"
    written = config.document.values.get("precision")
    problems = []
    for name, form in sorted({each for column in precisions.values() for each in column.items()}):
        if name not in without and form not in packed.get(name, {}):
            is_written = form != config.precision or form == written
            step = "" if is_written else f"write `precision: {form}` into the line file, then "
            lack = f"not packed in {form} - {step}run {profiling}{', which packs it' if is_written else ''}"
            problems.append(config.document.error(lack, "experts", name))
    if problems:
        raise ConfigError.of(problems)
