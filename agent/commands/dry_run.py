"""`coserve doctor LINE.yaml --as BOX`: decisions of an agent of a line on a box that is not there.

Guarantees: decides by the functions that serving uses; asks no device, packs, runs and writes nothing. Weights that are
packed in a form count as packed, others by shapes and headers, without what they share. The device profile is not used:
batches get a quarter of a memory, as at most without a profile.
"""

from __future__ import annotations

import re
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from agent.commands.doctor import Check, capability_checks
from agent.deployment.build import AgentOptions, deployment_of
from agent.deployment.memory_split import shares_of
from agent.deployment.packed_copies import by_precision, copies_of, packed_experts
from agent.runtime.machine.box import MemorySize
from agent.runtime.machine.detection import box_with, host_memory
from agent.runtime.measuring.probe import estimated_matrix
from experts.backends import backend_for
from experts.backends.capabilities import METAL, Capabilities, cuda_capabilities, supposed
from experts.errors import ConfigError, CoServeError
from experts.packed.weights import ALIGNMENT_BYTES, Blocks, PackedExpert, Segment
from experts.sizes import size_bytes, size_text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from agent.config import LineConfig
    from agent.core.performance import PoolSpec
    from agent.deployment.memory_needs import MemoryNeeds
    from agent.runtime.machine.box import Box
    from experts.expert import Expert, Precision

BOXES = "cuda:sm_86:12GiB (any compute capability and memory), jetson or jetson:16GiB, mps or mps:24GiB"
UNIFIED_SIZES = {"jetson": "16GiB", "mps": "24GiB"}  # if none is given
ORIN = (8, 7)
LARGE_BATCH = 2**20  # of an image: takes all that batches may have


@contextmanager
def supposed_box(text: str) -> Iterator[Box]:
    """Box of `--as`, with its capabilities meanwhile. Cores, and host memory beside a device's, are this box's.

    Raises ConfigError with the known forms.
    """
    compute = ORIN
    match text.split(":"):
        case ["cuda" as name, model, size] if re.fullmatch(r"sm_\d{2,3}", model):
            compute = int(model[3:-1]), int(model[-1])
        case ["jetson" | "mps" as name, *sizes] if len(sizes) < 2:
            size = sizes[0] if sizes else UNIFIED_SIZES[name]
        case _:
            raise ConfigError(f"--as: {text!r} is no box that is known - write {BOXES}")
    try:
        memory = MemorySize(size_bytes(size), size_bytes(size))
    except ValueError as error:
        raise ConfigError(f"--as: {error}") from error
    rows = {"mps": METAL, "cuda": cuda_capabilities(compute)}
    host, device = (host_memory(), memory) if name == "cuda" else (memory, None)
    if name == "jetson":  # its packages of torch bring no Triton, its CPU has no numbers of 16 bits
        rows["cuda"] = cuda_capabilities(ORIN, is_integrated=True, has_triton=False)
        rows["cpu"] = Capabilities((), has_own_memory=False)
    with supposed(rows):
        yield box_with(name, f"{text}, supposed", host, device)


def examine_as(config: LineConfig, text: str) -> list[Check]:
    """Findings on such a box, the first of which says that this is a dry run. Raises ConfigError for an unknown box."""
    checks = [Check("dry run", f"as {text}: no device was asked, nothing is packed, run or written")]
    with supposed_box(text) as box:
        try:
            checks.extend(_plan(config, box))
        except ConfigError as error:  # a problem's text is what is wrong, and after a dash what to do
            parts = {problem: problem.message.rpartition(" - ") for problem in error.problems}
            checks += [Check(each.place.key if each.place else "line", *parts[each][::2]) for each in parts]
    told = "times, largest batches and so the memory of batches, faster forms and their proofs"
    return [*checks, Check("only a profile tells", f"{told}: `coserve profile {config.document.file}` on that box")]


def _plan(config: LineConfig, box: Box) -> Iterator[Check]:
    yield Check("device", f"{box.name}, processors {', '.join(box.processors)}")
    yield from capability_checks(box)
    if config.device not in {"auto", box.name, box.processors[0]}:
        fix = "write `device: auto`; the rest of this plan is as if it stood there"
        yield Check("device of the line", f"the line file names {config.device}: an agent leaves {box.name} idle", fix)
    plan = deployment_of(config, config.packed_folder, AgentOptions(profile=None), box)
    counts = Counter(spec.processor for spec in plan.executors)
    yield Check("executors", ", ".join(f"{n} {name}" for name, n in counts.items()) or "in workers: not in this plan")
    packed = by_precision(packed_experts(config, config.packed_folder))
    for name, form in sorted({pair for column in plan.precisions.values() for pair in column.items()}):
        try:
            if form not in packed.setdefault(name, {}):
                packed[name][form] = _estimated(config.catalog.experts[name], form)
        except (CoServeError, OSError) as error:
            yield Check(f"expert {name}", str(error), "correct the file, or its entry in the line file")
    able = copies_of(config, plan.precisions, packed)
    copies = plan.sized(able, lambda sized: estimated_matrix(box, sized, plan.usage))
    for processor, listed in copies.items():
        forms = Counter(copy.packed.precision for copy in listed)
        texts = [copy.expert.id for copy in listed if copy.expert.takes_texts]
        found = ", ".join(f"{count} in {form}" for form, count in sorted(forms.items()))
        yield Check(f"experts {processor}", f"{found}; language models: {', '.join(texts) or 'none'}")
    times = estimated_matrix(box, copies, plan.usage).changed(
        lambda _processor, _expert, row: replace(row, performance=replace(row.performance, max_batch=LARGE_BATCH))
    )
    for needs, spec in shares_of(config, box, plan.executors, times):
        yield _memory(needs, spec)
    plan.setup(times)


def _memory(needs: MemoryNeeds, spec: PoolSpec) -> Check:
    parts = [f"experts {size_text(spec.expert_bytes)}", f"batches {size_text(spec.workspace_bytes)}"]
    parts += [f"keys and values of texts {size_text(spec.lease_bytes * needs.arenas)}"] if spec.lease_bytes else []
    held, all_bytes = needs.count_in(spec.expert_bytes), (0, *needs.held_bytes)[-1]
    holds = f"holds {held} of {len(needs.held_bytes)} copies, which are {size_text(all_bytes)}"
    return Check(f"memory {spec.name}", f"{size_text(needs.whole_bytes)}: {', '.join(parts)}; {holds}")


def _estimated(expert: Expert, form: Precision) -> PackedExpert:
    """An expert as packing will make it. Language models on one ``weights`` share it, up to their adapters."""
    found = backend_for(expert.architecture).weight_bytes(expert, form)
    name = f"{expert.weights if expert.takes_texts else expert.id} {form}"
    dense, shared = Segment(name, found.dense_bytes, ()), []
    if found.blocks:
        block_bytes = -(-found.block_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        blocks = Blocks(block_bytes, ("",) * found.blocks)
        shared = [Segment(f"{name} moe_experts", block_bytes * found.blocks, (), blocks)]
    own = Segment(expert.id, 0, ()) if expert.takes_texts else dense
    shared += [dense] if expert.takes_texts else []
    return PackedExpert(expert.id, expert.architecture, form, "", "", own, tuple(shared))
