"""ONNX Runtime sessions: one per program, number of threads and device, shared by all users.

Guarantees: a program's session is built once and lives while a skeleton or template refers to it; beside those, the
latest SESSIONS_KEPT live. A trial at packing has a separate session on one thread, and keeps none. Telemetry is off.

Each session has its own threads, asleep between batches: Python cannot stop ONNX Runtime's process-wide pool from
spinning, which doubled a MobileNetV3's processor time. Asleep, 36 threads hold 3 MB. A session holds no weights. All
share one arena for workspace: with one each, every architecture would keep its own; without any, detectors of large
images run up to a third slower, waiting for the system.
"""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import TensorProto, helper, numpy_helper
from onnxruntime import GraphOptimizationLevel, OrtAllocatorType, OrtArenaCfg, OrtMemoryInfo, OrtMemType
from onnxruntime.capi import onnxruntime_pybind11_state as ort_errors

from experts.backends.made_once import MadeOnce
from experts.errors import BackendUnavailable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
REFUSALS = (
    ort_errors.Fail, ort_errors.InvalidArgument, ort_errors.InvalidGraph, ort_errors.InvalidProtobuf,
    ort_errors.NotImplemented, ort_errors.RuntimeException,
)  # fmt: skip
SESSIONS_KEPT = 2  # without a skeleton or template: a profile soon returns to a form
ARENA_FRACTION = 0.125  # arbitrary: of a device, for the intermediate tensors of one session
GROW_AS_REQUESTED = 1  # of the arena; its default doubles what it holds
_preparing = Lock()
_NOTES = ("producer_name", "producer_version", "doc_string", "metadata_props", "model_version", "domain")


def shared_session(
    program: bytes, threads: int, device: str, *, is_final: bool = False
) -> onnxruntime.InferenceSession:
    """``is_final``: without optimisation. Raises BackendUnavailable for a device or program that does not run."""
    return _sessions(program, threads, device, is_final)


def _make_session(program: bytes, threads: int, device: str, is_final: bool) -> onnxruntime.InferenceSession:
    provider = PROVIDERS.get(torch.device(device).type, "none")
    if provider not in onnxruntime.get_available_providers():
        raise BackendUnavailable(f"onnxruntime on {device}", "this ONNX Runtime has no provider for it; run it on cpu")
    options = _options(threads, is_final=is_final)
    try:
        session = onnxruntime.InferenceSession(program, options, providers=_providers(provider, device))
    except REFUSALS as error:
        raise BackendUnavailable(f"onnxruntime on {device}", f"it refuses a packed program: {error}") from error
    if session.get_providers()[0] != provider:
        raise BackendUnavailable(f"onnxruntime on {device}", f"it fell back to {session.get_providers()[0]}")
    return session


_sessions = MadeOnce(_make_session, SESSIONS_KEPT)


def session_once(program: bytes, *, is_final: bool = False) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(program, _options(1, is_final=is_final), providers=[PROVIDERS["cpu"]])


def one_operator(
    node: onnx.NodeProto, shape: Sequence[int], constants: Mapping[str, object], element: int = TensorProto.FLOAT
) -> onnx.ModelProto:
    """A graph of one operator from ``x``, of that shape, to ``y``."""
    source, answer = (
        helper.make_tensor_value_info(name, element, extents) for name, extents in (("x", shape), ("y", None))
    )
    weights = [numpy_helper.from_array(np.asarray(values), name) for name, values in constants.items()]
    graph = helper.make_graph([node], "trial", [source], [answer], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def try_runtime() -> None:
    """Run one convolution on the CPU. Raises ArithmeticError for a wrong answer, and one of REFUSALS."""
    ones = np.ones((1, 1, 3, 3), np.float32)
    model = one_operator(helper.make_node("Conv", ["x", "w"], ["y"]), ones.shape, {"w": ones})
    found = session_once(model.SerializeToString()).run(None, {"x": ones})[0]
    if float(found.item()) != ones.size:
        raise ArithmeticError(f"it convolves {ones.size} ones to {found.item():g}")


def optimised(model: onnx.ModelProto, level: GraphOptimizationLevel, without: tuple[str, ...] = ()) -> onnx.ModelProto:
    """Optimise for the CPU, ``without`` some optimizers, and strip notes: equal graphs become equal programs."""
    options = _options(threads=1)
    options.graph_optimization_level = level
    with tempfile.TemporaryDirectory(prefix="coserve-onnx-") as folder:
        options.optimized_model_filepath = str(Path(folder) / "optimised.onnx")
        onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=[PROVIDERS["cpu"]], disabled_optimizers=list(without)
        )
        result = onnx.load_model(options.optimized_model_filepath)
    strip_notes(result)
    return result


def strip_notes(model: onnx.ModelProto) -> None:
    """Remove notes that no answer depends on: exporter, date, lines of source."""
    for field in _NOTES:
        model.ClearField(field)
    graph = model.graph
    graph.name = "graph"
    for field in ("doc_string", "metadata_props"):
        graph.ClearField(field)
        for part in (*graph.node, *graph.input, *graph.output, *graph.value_info, *graph.initializer):
            part.ClearField(field)


def _providers(provider: str, device: str) -> list[str | tuple[str, dict[str, str]]]:
    if provider == PROVIDERS["cpu"]:
        return [provider]
    number = number_of(torch.device(device))
    total_bytes = torch.cuda.get_device_properties(number).total_memory
    return [(provider, cuda_options(number, total_bytes)), PROVIDERS["cpu"]]


def number_of(device: torch.device) -> int:
    """Number of a device: torch's current one if it names none."""
    return torch.cuda.current_device() if device.type == "cuda" and device.index is None else device.index or 0


def cuda_options(device: int, total_bytes: int) -> dict[str, str]:
    """Options of a session on a GPU: a bounded arena that grows as requested, and no search that tries all algorithms,
    which takes seconds and memory for each new shape."""
    return {
        "device_id": str(device),
        "gpu_mem_limit": str(int(total_bytes * ARENA_FRACTION)),
        "arena_extend_strategy": "kSameAsRequested",
        "cudnn_conv_algo_search": "HEURISTIC",
        "use_tf32": "0",  # graphs are of fp32, and the default rounds factors to ten bits
    }


@cache
def _prepare_process() -> None:
    memory = OrtMemoryInfo("Cpu", OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, OrtMemType.DEFAULT)
    onnxruntime.create_and_register_allocator(memory, OrtArenaCfg({"arena_extend_strategy": GROW_AS_REQUESTED}))


def _options(threads: int, *, is_final: bool = False) -> onnxruntime.SessionOptions:
    with _preparing:  # a cache alone would admit two threads at once
        _prepare_process()
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors only, which are also raised as exceptions
    options.intra_op_num_threads = threads
    options.add_session_config_entry("session.use_env_allocators", "1")  # the arena of the process
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # the cores belong to other experts too
    if is_final:
        options.graph_optimization_level = GraphOptimizationLevel.ORT_DISABLE_ALL
    return options
