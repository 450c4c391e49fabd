"""The search for the best of a system where the memory does not hold every count of executors."""

from __future__ import annotations

from pathlib import Path

import pytest

from experts.errors import ConfigError
from proof.paper.devices import PaperDevice, read_device
from proof.paper.evaluation import search_best
from proof.paper.systems import System
from proof.paper.tasks import PaperBoard, task_of

UMA = read_device(Path(__file__).parents[3] / "configs" / "devices" / "uma-apple-m2.yaml")
TASK = task_of(PaperBoard("T", 60, seed=5), 60, "T")
LARGEST_BYTES = max(each.weight_bytes.value for each in UMA.architectures.values())


def needed_bytes(gpu, cpu):
    """What these executors take with batches of the maximum size, beside the largest expert."""
    taken = LARGEST_BYTES
    for name, count in (("gpu", gpu), ("cpu", cpu)):
        times = [getattr(each, name) for each in UMA.architectures.values()]
        batch_bytes = max(each.workspace_bytes.value * each.max_batch.value for each in times)
        taken += count * (UMA.processor(name).executor_bytes.value + batch_bytes)
    return taken


def with_memory(usable_bytes):
    document = UMA.model_dump()
    host = document["memories"]["host"]
    host["size_bytes"]["value"] = host["system_bytes"]["value"] + usable_bytes
    return PaperDevice.model_validate(document)


def found(usable_bytes):
    return search_best(with_memory(usable_bytes), TASK, "T", System("paper", "paper", {"gpu": 1, "cpu": 1}))


def test_the_sweep_ends_where_memory_holds_no_more_executors():
    best = found(needed_bytes(gpu=2, cpu=1))
    assert [row.executors for row in best.gpu_sweep] == [{"gpu": 1, "cpu": 1}, {"gpu": 2, "cpu": 1}]
    fastest = max(best.executors, key=lambda row: row.images_per_s)
    assert {"gpu": 0, "cpu": 0} | fastest.executors == best.system.executors


def test_a_memory_for_one_gpu_executor_alone_has_no_sweep_beside_a_cpu():
    best = found(needed_bytes(gpu=1, cpu=0))
    assert best.system.executors == {"gpu": 1, "cpu": 0}
    assert best.gpu_sweep == ()
    assert [row.executors for row in best.cpu_sweep] == [{"gpu": 1}]


def test_a_memory_that_holds_no_count_at_all_is_refused():
    with pytest.raises(ConfigError, match="no room for the largest expert, or for an image of each of 2 executors"):
        found(needed_bytes(gpu=1, cpu=0) - 1)
