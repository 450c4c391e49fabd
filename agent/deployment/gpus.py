"""GPUs of the agent's box: one for each process, first the agent's own, then its workers, then ranks of models."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from agent.deployment.executors import are_in_workers
from agent.environment import torchrun_meeting, visible_gpus

if TYPE_CHECKING:
    from collections.abc import Iterator

    from agent.config import LineConfig

ON_GPU = ("cuda", "auto")


def gpus_of_workers(config: LineConfig) -> dict[str, str]:
    """The GPU that each worker of this box sees, by name, if it may have one; "" if none is left."""
    gpus = _beside_agent(config)
    return {name: next(gpus, "") for name, kind in config.cluster.kinds.items() if kind.device in ON_GPU}


def gpus_of_ranks(config: LineConfig, count: int) -> dict[str, tuple[str, ...]]:
    """GPUs of language models whose ranks get one each, by expert. ``count``: of this box, for such ranks.

    Ranks of other models compute on CPUs, as those of several boxes do.
    """
    if config.device not in ON_GPU or torchrun_meeting() is not None:
        return {}
    here = () if config.cluster.address is not None else gpus_of_workers(config)
    left = list(islice(_beside_agent(config), max(count - _of_agent(config), 0)))[len(here) :]
    found = {}
    for name, expert in config.catalog.experts.items():
        if expert.parallel is not None and expert.parallel.ranks <= len(left):
            found[name], left = tuple(left[: expert.parallel.ranks]), left[expert.parallel.ranks :]
    return found


def _beside_agent(config: LineConfig) -> Iterator[str]:
    gpus = visible_gpus()
    for _ in range(_of_agent(config)):
        next(gpus, None)
    return gpus


def _of_agent(config: LineConfig) -> int:
    """1 if the agent's own process has executors of a GPU, if there is one."""
    own = config.executors
    return int(config.device in ON_GPU and not are_in_workers(config) and (own is None or bool(own.get("cuda"))))
