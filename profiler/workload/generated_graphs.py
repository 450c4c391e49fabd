"""Generated ONNX experts, detectors and anomaly experts: random weights, and one program for all of a kind."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from experts.expert import ANOMALY_LABELS, Expert, InputSpec, Task
from profiler.workload.generated_line import require_disk
from profiler.workload.graph_kinds import GraphKind

if TYPE_CHECKING:
    from pathlib import Path

LARGEST_BYTES = 90_000_000  # of a file of either kind


def write_graph_experts(folder: Path, kind: GraphKind, count: int) -> list[Expert]:
    """Experts of one kind, each with weights of its own, written below ``folder``.

    Raises ConfigError where the disk has no room for them and their packed form; OSError for what it refuses.
    """
    from experts.backends.onnx.layouts import image_facts
    from profiler.workload import made_up_graphs

    require_disk(folder, 2 * count * LARGEST_BYTES, f"{count} experts and their packed form")
    (folder / "weights").mkdir()
    paths = [folder / "weights" / f"{kind}-{number:03d}.onnx" for number in range(count)]
    if kind is GraphKind.ANOMALY:
        made_up_graphs.write_anomaly_models(paths, made_up_graphs.BANK_ROWS)
        spec = InputSpec(made_up_graphs.ANOMALY_PX, made_up_graphs.ANOMALY_PX)
        return [Expert(path.stem, "onnx", path, ANOMALY_LABELS, spec, task=Task.ANOMALY) for path in paths]
    made_up_graphs.write_detectors(paths)
    spec = InputSpec(made_up_graphs.DETECTOR_PX, made_up_graphs.DETECTOR_PX, "unit")
    experts = [Expert(path.stem, "onnx", path, made_up_graphs.DETECTOR_LABELS, spec) for path in paths]
    return [replace(expert, input=image_facts(expert).applied(expert.pixels)) for expert in experts]
