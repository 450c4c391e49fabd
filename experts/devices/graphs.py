"""CUDA graphs of an executor: work that is captured once, and then launched as a whole instead of kernel by kernel.

A graph reads and writes fixed addresses. So its inputs are copied into tensors of its own, and it belongs to an
``owner``: the object that holds all else that the work reads, with which the graph goes. Slots are overwritten in
place: what is bound to a slot's addresses stays, and so do its graphs, when the slot's bytes become another expert's.

Guarantees: a thread without graphs, the usual one, runs as before. Once a capture fails, its executor runs without
graphs for good. Captures have not yet run on hardware.
"""

from __future__ import annotations

import logging
from collections import Counter
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Lock
from typing import TYPE_CHECKING, TypeAlias
from weakref import WeakKeyDictionary

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Sequence

    from torch import Tensor

    Graph: TypeAlias = tuple[Sequence[Tensor], Tensor, Callable[[], None]]  # its inputs, result and replay

log = logging.getLogger(__name__)
RUNS_BEFORE = 2  # a capture takes as long as some runs, and a slot may be bound anew at once
GRAPH_BYTES = 2 * 1024 * 1024  # arbitrary: launches of a graph, which CUDA keeps outside torch's allocator
CAPTURING = Lock()  # held by whatever would join a capture of another thread, or end it


class Recorder:
    """Captures on the thread's CUDA stream, not the default one. Graphs share a pool: one runs at a time."""

    def __init__(self) -> None:
        self.pool_bytes = 0
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, work: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        """Result of the work, and its replay, which writes the result anew. Raises RuntimeError if it fails."""
        work()  # kernels are compiled and tried, and libraries take their memory, outside the capture
        graph = torch.cuda.CUDAGraph()
        with CAPTURING:
            torch.cuda.current_stream().synchronize()
            before_bytes = torch.cuda.memory_reserved()
            graph.capture_begin(self._pool, capture_error_mode="thread_local")  # other threads go on
            try:
                result = work()
            finally:
                graph.capture_end()
            self.pool_bytes += max(torch.cuda.memory_reserved() - before_bytes, 0)
        return result, graph.replay


class DeviceGraphs:
    """Graphs of one executor's thread. No more are captured once they hold ``most_bytes``."""

    def __init__(self, recorder: Recorder, most_bytes: int) -> None:
        self._recorder = recorder
        self._most_bytes = most_bytes
        self._graphs: WeakKeyDictionary[object, dict[Hashable, Graph]] = WeakKeyDictionary()
        self._runs: WeakKeyDictionary[object, Counter[Hashable]] = WeakKeyDictionary()  # before their captures
        self._has_failed = False

    @property
    def held_bytes(self) -> int:
        return self._recorder.pool_bytes + GRAPH_BYTES * sum(map(len, self._graphs.values()))

    def run(
        self, owner: object, work: Callable[..., Tensor], inputs: Sequence[Tensor], shapes: Sequence[Sequence[int]],
        key: Hashable = None,
    ) -> Tensor | None:  # fmt: skip
        """Result of ``work(*inputs)`` by a graph, valid until that runs again; None: the caller runs the work.

        ``shapes``: of the graph's inputs, each as large as the input's or larger. Rows added are the first one; other
        numbers added are of an earlier run, or zeros. ``key``: addresses that the work uses beside its owner's.
        """
        graphs, runs = self._graphs.setdefault(owner, {}), self._runs.setdefault(owner, Counter())
        key = key, *map(tuple, shapes)
        if key not in graphs:
            runs[key] += 1
            is_full = self.held_bytes + GRAPH_BYTES > self._most_bytes
            if self._has_failed or is_full or runs[key] <= RUNS_BEFORE:
                return None
            pairs = zip(inputs, shapes, strict=True)  # an image keeps its memory format
            own = [torch.empty_like(one) if one.shape == (*shape,) else one.new_zeros(shape) for one, shape in pairs]
            _fill(own, inputs)
            try:
                graphs[key] = own, *self._recorder.record(lambda: work(*own))
            except RuntimeError as error:
                log.warning("graphs_off reason=%s: this executor runs without CUDA graphs", error)
                self._has_failed = True
                self._graphs.clear()
                return None
        fixed, result, replay = graphs[key]
        _fill(fixed, inputs)
        replay()
        return result


_here: ContextVar[DeviceGraphs | None] = ContextVar("graphs", default=None)
graphs_here = _here.get  # of this thread's executor; None: it has none


@contextmanager
def using_graphs(graphs: DeviceGraphs | None) -> Iterator[None]:
    token = _here.set(graphs)
    try:
        yield
    finally:
        _here.reset(token)


def _fill(own: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    for target, given in zip(own, inputs, strict=True):
        target[tuple(map(slice, given.shape))].copy_(given)
        target[len(given) :] = target[:1]
