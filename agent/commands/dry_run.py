"""`coserve doctor LINE.yaml --as BOX`: decisions of an agent of a line on a box that is not there.

Guarantees: decides by the functions that serving uses; asks no device, packs, runs and writes nothing. Weights that are
packed in a form count as packed, others by shapes and headers, without what they share. The device profile is not used:
batches get a quarter of a memory, as at most without a profile.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from agent.commands.doctor import Check, capability_checks
from agent.core.performance import HOST
from agent.deployment.build import AgentOptions, deployment_of
from agent.deployment.memory_split import limits_of, shares_of
from agent.deployment.packed_copies import by_precision, copies_of, packed_experts
from agent.runtime.machine.box import Box, MemorySize
from agent.runtime.machine.detection import box_with, host_memory
from agent.runtime.measuring.probe import estimated_matrix
from experts.backends import backend_for
from experts.backends.capabilities import METAL, Capabilities, cuda_capabilities, supposed
from experts.errors import ConfigError, CoServeError
from experts.packed.weights import ALIGNMENT_BYTES, Blocks, PackedExpert, Segment
from experts.sizes import size_bytes, size_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from agent.config import LineConfig
    from agent.core.performance import ExpertProfile, PoolSpec
    from agent.deployment.deployment import Copies, Deployment
    from agent.deployment.memory_needs import MemoryNeeds
    from experts.expert import Expert, Precision

BOXES = "cuda:sm_86:12GiB (any compute capability and memory), jetson or jetson:16GiB, mps or mps:24GiB"
BOX = re.compile(r"(?:(cuda):sm_(\d{1,2})(\d)|(jetson)|(mps))(?::(.+))?")
UNIFIED_SIZES = {"jetson": "16GiB", "mps": "24GiB"}  # if none is given
ORIN = (8, 7)
LARGE_BATCH = 2**20
NAMED = 3  # experts of a form; more are counted


@dataclass(frozen=True, slots=True)
class SupposedBox:
    box: Box
    rows: Mapping[str, Capabilities]


def supposed_box(text: str) -> SupposedBox:
    """Box of `--as`. Cores, and host memory beside a memory of the device, are this box's.

    Raises ConfigError with the known forms.
    """
    found = BOX.fullmatch(text)
    name = "" if found is None else found[1] or found[4] or found[5]
    size = "" if found is None else found[6] or UNIFIED_SIZES.get(name, "")
    try:
        if found is None or not size:
            raise ValueError(f"{text!r} is no box that is known")
        memory = MemorySize(size_bytes(size), size_bytes(size))
    except ValueError as error:
        raise ConfigError(f"--as: {error} - write {BOXES}") from error
    if name == "cuda":
        compute = int(found[2]), int(found[3])
        rows = {"cuda": cuda_capabilities(compute)}
        return SupposedBox(box_with(name, f"NVIDIA sm_{found[2]}{found[3]}", host_memory(), memory), rows)
    if name == "jetson":  # its packages of torch bring no Triton, its CPU has no numbers of 16 bits
        rows = {"cuda": cuda_capabilities(ORIN, is_integrated=True, has_triton=False)}
        rows["cpu"] = Capabilities((), has_own_memory=False)
        return SupposedBox(box_with(name, "Jetson Orin", memory), rows)
    return SupposedBox(box_with(name, "Apple M", memory), {"mps": METAL})


def examine_as(config: LineConfig, text: str) -> list[Check]:
    """Findings on such a box, the first of which says that this is a dry run. Raises ConfigError for an unknown box."""
    known = supposed_box(text)
    checks = [Check("dry run", f"as {text}: no device was asked, nothing is packed, run or written")]
    with supposed(known.rows):
        try:
            checks.extend(_plan(config, known.box))
        except ConfigError as error:
            checks += [_refusal(problem) for problem in error.problems]
    told = "times, largest batches and so the memory of batches, faster forms and their proofs"
    return [*checks, Check("only a profile tells", f"{told}: `coserve profile {config.document.file}` on that box")]


def _plan(config: LineConfig, box: Box) -> Iterator[Check]:
    yield Check("device", f"{box.name} ({box.model}), processors {', '.join(box.processors)}")
    yield from capability_checks(box)
    if config.device not in {"auto", "cuda" if box.name == "jetson" else box.name}:
        fix = "write `device: auto`; the rest of this plan is as if it stood there"
        yield Check("device of the line", f"the line file names {config.device}: an agent leaves {box.name} idle", fix)
    plan = deployment_of(config, config.packed_folder, AgentOptions(profile=None), box)
    counts = Counter(spec.processor for spec in plan.executors)
    yield Check("executors", ", ".join(f"{n} {name}" for name, n in counts.items()) or "in workers: not in this plan")
    for processor, column in plan.precisions.items():
        yield Check(f"forms {processor}", _named(column))
    packed, unreadable = _packed(plan)
    for name, reason in unreadable.items():
        yield Check(f"expert {name}", reason, "correct the file, or its entry in the line file")
    able = copies_of(config, plan.precisions, packed)
    if any(expert.takes_texts for expert in config.catalog.experts.values()):
        yield _texts(able)
    copies = plan.sized(able, lambda sized: estimated_matrix(box, sized, plan.usage))
    for copy in dict.fromkeys(copy for listed in copies.values() for copy in listed if copy.is_offloaded):
        found = f"its memory holds {copy.moe_places} of its moe_experts at a time"
        yield Check(f"expert {copy.expert.id}", found)
    times = estimated_matrix(box, copies, plan.usage).changed(_with_large_batches)
    specs = []
    for needs, spec in shares_of(config, box, plan.executors, times):
        specs.append(spec)
        yield _memory(needs, spec)
    images = limits_of(config, tuple(specs)).prepared_bytes
    yield Check("memory images", f"{size_text(images)} of {HOST} memory for images ahead of their batches")
    plan.setup(times)


def _with_large_batches(_processor: str, _expert: str, row: ExpertProfile) -> ExpertProfile:
    """The row of an expert whose batches take all of their part of a memory, as they may once they are measured."""
    return replace(row, performance=replace(row.performance, max_batch=LARGE_BATCH))


def _texts(copies: Copies) -> Check:
    where = [processor for processor, listed in copies.items() if any(copy.expert.takes_texts for copy in listed)]
    if where:
        return Check("texts", f"language models run on {', '.join(where)}")
    return Check("texts", "no executor runs language models", "correct these experts, or leave them out")


def _memory(needs: MemoryNeeds, spec: PoolSpec) -> Check:
    parts = [f"experts {size_text(spec.expert_bytes)}", f"batches {size_text(spec.workspace_bytes)}"]
    parts += [f"keys and values of texts {size_text(spec.lease_bytes * needs.arenas)}"] if spec.lease_bytes else []
    held, all_bytes = needs.count_in(spec.expert_bytes), needs.held_bytes[-1] if needs.held_bytes else 0
    holds = f"holds {held} of {len(needs.held_bytes)} copies, which are {size_text(all_bytes)}"
    return Check(f"memory {spec.name}", f"{size_text(needs.whole_bytes)}: {', '.join(parts)}; {holds}")


def _packed(plan: Deployment) -> tuple[dict[str, dict[Precision, PackedExpert]], dict[str, str]]:
    """Experts in the forms of a plan, as packed or as packing will make them; and why some cannot be packed."""
    config, unreadable = plan.config, dict[str, str]()
    packed = defaultdict(dict, by_precision(packed_experts(config, config.packed_folder)))
    for name, form in sorted({pair for column in plan.precisions.values() for pair in column.items()}):
        if form not in packed[name] and name not in unreadable:
            try:
                packed[name][form] = _estimated(config.catalog.experts[name], form)
            except CoServeError as error:
                unreadable[name] = str(error)
            except OSError as error:
                unreadable[name] = f"{error.filename}: {error.strerror}"
    return {name: forms for name, forms in packed.items() if name not in unreadable}, unreadable


def _estimated(expert: Expert, form: Precision) -> PackedExpert:
    """An expert as packing will make it. Language models on one ``weights`` share it, up to their adapters."""
    found = backend_for(expert.architecture).weight_bytes(expert, form)
    block_bytes = -(-found.block_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    model, own = f"{expert.weights} {form}", Segment(f"{expert.id} {form}", found.dense_bytes, ())
    shared: list[Segment] = []
    if expert.takes_texts:
        own, shared = Segment(own.sha256, 0, ()), [Segment(model, found.dense_bytes, ())]
    if found.blocks:
        blocks = Blocks(block_bytes, ("",) * found.blocks)
        shared.append(Segment(f"{model} moe_experts", block_bytes * found.blocks, (), blocks))
    return PackedExpert(expert.id, expert.architecture, form, "", "", own, tuple(shared))


def _named(column: Mapping[str, Precision]) -> str:
    by_form: defaultdict[str, list[str]] = defaultdict(list)
    for name, form in column.items():
        by_form[form].append(name)
    return "; ".join(
        f"{form}: {', '.join(names) if len(names) <= NAMED else f'{len(names)} experts'}"
        for form, names in sorted(by_form.items())
    )


def _refusal(problem: ConfigError) -> Check:
    """A problem's text is what is wrong, and after a dash what to do."""
    found, _, fix = problem.message.rpartition(" - ")
    name = "line file" if problem.place is None else problem.place.key
    return Check(name, found or fix, fix)
