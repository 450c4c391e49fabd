"""Section of workers: processes of this box, or of a Ray cluster, that judge images beside the agent."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from agent.line_file.machine import Device, ExecutorCounts, MemorySection
from experts.sections.values import Section

MOST_WORKERS = 256

Address = Annotated[str, Field(pattern=r"^(auto|[^\s:/]+:[0-9]{1,5}|\[[0-9a-fA-F:]+\]:[0-9]{1,5})$")]


class WorkerSection(Section):
    """Workers of one kind."""

    count: int = Field(1, strict=True, ge=1, le=MOST_WORKERS, description="number of workers of this kind")
    device: Device = Field("auto", description="auto, cpu, cuda, mps, emulated or integrated")
    executors: ExecutorCounts = Field(None, description="auto or executors per processor, of each worker")
    memory: MemorySection = Field(MemorySection(), description="memory budgets of each worker")
    resources: dict[str, Annotated[float, Field(gt=0)]] = Field(
        {}, description="what each takes of its node, in Ray's words: {GPU: 1, CPU: 8}; only with an address"
    )


class ClusterSection(Section):
    """Workers beside the agent. Without an address they are processes of this box."""

    address: Address | None = Field(
        None, description="of a Ray cluster: auto (this node's) or HOST:PORT; none: processes of this box"
    )
    workers: tuple[WorkerSection, ...] = Field((), description="kinds of workers")

    @property
    def kinds(self) -> dict[str, WorkerSection]:
        """Kind of each worker by its name: w1, w2, ..."""
        every = (kind for kind in self.workers for _ in range(kind.count))
        return {f"w{number}": kind for number, kind in enumerate(every, 1)}
