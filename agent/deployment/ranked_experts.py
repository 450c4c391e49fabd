"""Language models with ``parallel``: each is one worker, whose memory and executor are its ranks'.

Ranks of this box take memory that no other worker counts: the host's, or that of a GPU for each. Their times are
estimates: no other executor can run the model, and the engine of texts measures its iterations itself.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from agent.core.performance import HOST, SSD, ExecutorSpec, Footprint, PerformanceMatrix, PoolSpec
from agent.deployment.executors import gpus_of_ranks
from agent.deployment.memory_needs import LEASE_FRACTION
from agent.deployment.packed_copies import by_precision, copy_of, packed_experts
from agent.deployment.profile_in_use import precision_of
from agent.environment import torchrun_meeting
from agent.runtime.machine.box import MemorySize
from agent.runtime.machine.detection import gpus_for_ranks
from agent.runtime.measuring.probe import UNMEASURED, Probed, matrix_row, performance_of
from experts.backends.forms import form_of
from experts.errors import ExpertError
from experts.expert import Precision
from experts.llm.files.config import read_spec
from experts.llm.parallel.shape import shape_of
from experts.llm.parallel.slices import bytes_of_ranks
from experts.llm.serving.iteration import IterationLimits

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from agent.config import LineConfig
    from agent.core.performance import ExpertProfile
    from agent.deployment.deployment import Deployment
    from agent.runtime.expert_copy import ExpertCopy
    from agent.runtime.machine.box import Box
    from experts.expert import Expert

CPU = "cpu"
START_S = 10.0  # of processes with torch, before the first byte is read; arbitrary
B_S, K_PROMPT_S, K_OUTPUT_S = 0.05, 0.002, 0.05  # of an iteration and its tokens; arbitrary
PROCESS_BYTES = 400 * 1024 * 1024  # of a rank beside its weights, not shared with the others; torch 2.14
LEAST_CONTEXTS = 4  # whole contexts that keys and values have room for, without `kv`


def ranked_experts(config: LineConfig) -> list[Expert]:
    return [expert for expert in config.catalog.experts.values() if expert.parallel is not None]


def worker_name(expert: str) -> str:
    return f"ranks-{expert.replace('/', ':')}"  # no id has a colon: names differ


def beside_ranks(config: LineConfig, box: Box) -> Box:
    """The box without the memory that ranks take there.

    Raises ConfigError where it has not got so much, and for ranks that cannot meet those of other boxes.
    """
    free, meeting, ranked = box.host.available_bytes, torchrun_meeting(), ranked_experts(config)
    on_gpus = gpus_of_ranks(config, gpus_for_ranks())
    for expert in ranked:
        place, shape = ("experts", expert.id, "parallel"), shape_of(expert)
        share = 1.0
        if meeting is not None:
            if len(ranked) > 1:
                raise config.document.error(
                    "torchrun joins the ranks of one model only - serve the others alone", *place
                )
            try:
                shape.on_boxes(meeting.ranks_here)
            except ValueError as error:
                raise config.document.error(f"{error} - correct it or LOCAL_WORLD_SIZE", *place) from error
            share = meeting.ranks_here / shape.ranks
        with suppress(ExpertError):  # packing reports it
            precision = precision_of(config, expert.id, CPU, None, None)
            lease_bytes = _lease_bytes(config, expert, precision) * _key_copies(expert)
            all_ranks = PROCESS_BYTES * shape.ranks
            all_ranks += 0 if expert.id in on_gpus else bytes_of(expert, precision) + lease_bytes
            wanted = int(all_ranks * share)
            if wanted > free:
                raise config.document.error(
                    f"its ranks take {wanted} bytes on this box, which has {free} free - lower texts: kv, run some "
                    "on other boxes, or take a box with more",
                    *place,
                )
            free -= wanted
    return replace(box, host=MemorySize(box.host.total_bytes, free))


def bytes_of(expert: Expert, precision: Precision) -> int:
    """Bytes of all ranks' weights. Raises ExpertError for an unreadable directory."""
    spec = read_spec(expert.weights, expert.id)
    return bytes_of_ranks(spec, shape_of(expert), form_of(precision).dtype.itemsize)


def parts_of_ranks(line: Deployment, packed: Path) -> Iterator[tuple[str, Deployment]]:
    """Each such model's worker: its name, and its part of the line. ``packed``: folder."""
    config = line.config
    forms = by_precision(packed_experts(config, packed))
    for expert in ranked_experts(config):
        columns = line.precisions
        precision = (columns[CPU] if CPU in columns else next(iter(columns.values())))[expert.id]
        if precision not in forms.get(expert.id, {}):
            continue  # packing has failed, and says why
        copy = copy_of(config, expert.id, precision, forms[expert.id][precision])
        row = _row(copy)
        workspace_bytes = row.performance.workspace_for(row.performance.max_batch)
        lease_bytes = _lease_bytes(config, expert, precision)
        pool = PoolSpec(HOST, row.footprint.own_bytes, workspace_bytes, lease_bytes=lease_bytes)
        executor = ExecutorSpec(0, CPU, HOST)
        part = replace(line, profile=None, executors=(executor,), pools=(pool,), copies={CPU: [copy]}, unpacked={})
        yield worker_name(expert.id), part


def times_of_ranks(part: Deployment) -> Probed:
    (copy,) = part.all_copies
    return Probed(PerformanceMatrix({CPU: {copy.expert.id: _row(copy)}}, part.usage), {})


def _row(copy: ExpertCopy) -> ExpertProfile:
    weight_bytes = bytes_of(copy.expert, Precision(copy.packed.precision))
    performance = replace(
        performance_of(copy, 0.0, B_S, IterationLimits().rows), K_prompt_s=K_PROMPT_S, K_output_s=K_OUTPUT_S
    )
    row = matrix_row(copy, performance, UNMEASURED, HOST)
    load_s = START_S + weight_bytes / UNMEASURED[SSD]
    return replace(row, footprint=Footprint(weight_bytes), load_s={SSD: load_s})


def _key_copies(expert: Expert) -> int:
    """Ranks that hold the keys and values of one head: more than one if tensor ranks outnumber these heads."""
    return max(shape_of(expert).tensor // read_spec(expert.weights, expert.id).kv_heads, 1)


def _lease_bytes(config: LineConfig, expert: Expert, precision: Precision) -> int:
    """Bytes for keys and values: the line file's, else a part of the weights, and some whole contexts at least."""
    if config.texts.kv is not None:
        return config.texts.kv
    spec = read_spec(expert.weights, expert.id)
    context_bytes = spec.kv_bytes(form_of(precision).dtype.itemsize) * spec.max_positions
    return max(int(bytes_of(expert, precision) * LEASE_FRACTION), LEAST_CONTEXTS * context_bytes)
