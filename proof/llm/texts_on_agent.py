"""Jobs through a whole agent: packed models, ledgers, leases, quanta, as `coserve serve` would run them."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import yaml

from agent.config import read_line
from agent.deployment.build import build_agent
from agent.runtime.text_sources import TextSource
from experts.errors import CoServeError
from experts.llm.serving.generation import GREEDY, Generation, TextRequest
from experts.sizes import MEBIBYTE
from proof.llm.our_engine import Collected

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from agent.core.request import Outcome
    from agent.deployment.build import Agent
    from agent.runtime.loop import LoopStatistics
    from proof.llm.text_jobs import TextJob

KV_BYTES, WORKSPACE_BYTES = 64 * MEBIBYTE, 64 * MEBIBYTE
ANSWER_LIMIT_S = 600.0


@dataclass(frozen=True, slots=True)
class Ask:
    model: str
    job: TextJob


@dataclass(slots=True)
class _Outcomes:
    told: threading.Condition = field(default_factory=threading.Condition)
    by_request: dict[int, Outcome] = field(default_factory=dict)

    def take(self, request: int, outcome: Outcome) -> None:
        with self.told:
            self.by_request[request] = outcome
            self.told.notify_all()

    def wait_for(self, requests: Sequence[int]) -> None:
        """Until all have ended. Raises CoServeError for one that did not end with its answer, or that none comes."""
        with self.told:
            if not self.told.wait_for(lambda: all(one in self.by_request for one in requests), ANSWER_LIMIT_S):
                raise CoServeError(f"texts were not written within {ANSWER_LIMIT_S:.0f} s")
            reasons = [outcome.reason for one in requests if (outcome := self.by_request[one]).label is None]
        if reasons:
            raise CoServeError(f"a text of the benchmark was not written: {reasons[0]}")


class TextAgent:
    """An agent that serves some models from so much memory for their weights."""

    def __init__(self, folder: Path, models: Mapping[str, Path], expert_bytes: int) -> None:
        """``folder``: a new one, for its line file and packed weights. Raises what building an agent raises."""
        folder.mkdir()
        file = folder / "line.yaml"
        file.write_text(yaml.safe_dump(_line(models, expert_bytes), sort_keys=False), "utf-8")
        self._outcomes = _Outcomes()
        self.agent: Agent = build_agent(
            read_line(file, environment={}), self._outcomes.take, lambda stage, done, total: None
        )
        self.agent.start()

    @property
    def statistics(self) -> LoopStatistics:
        return self.agent.loop.statistics()

    @property
    def loads(self) -> int:
        return sum(self.statistics.engine.loads.values())

    @property
    def slot_bytes(self) -> dict[str, int]:
        """The memory that each model takes alone."""
        return {
            packed.expert: sum(segment.slot_bytes for segment in packed.segments)
            for packed in self.agent.packed.values()
        }

    def write(self, asks: Sequence[Ask]) -> list[list[int]]:
        """Runs all at once; each one's tokens, when all are there."""
        writers = [Collected() for _ in asks]
        requests = [self._submit(ask, writer) for ask, writer in zip(asks, writers, strict=True)]
        self._outcomes.wait_for(requests)
        return [writer.tokens for writer in writers]

    def close(self) -> None:
        self.agent.stop()

    def _submit(self, ask: Ask, writer: Collected) -> int:
        text = TextRequest(Generation(ask.job.prompt, ask.job.output, GREEDY), writer)
        return self.agent.loop.submit(TextSource(lambda _: text), expert=self.agent.expert(ask.model))


def _line(models: Mapping[str, Path], expert_bytes: int) -> dict[str, object]:
    whole_mib = math.ceil((expert_bytes + KV_BYTES + WORKSPACE_BYTES) / MEBIBYTE)
    experts = {name: {"architecture": "llm", "weights": str(directory)} for name, directory in models.items()}
    return {
        "line": "bench-llm",
        "state": "./state",
        "precision": "fp32",
        "experts": experts,
        "texts": {"kv": f"{KV_BYTES // MEBIBYTE}MiB", "prefix_cache": False},
        "memory": {"host": f"{whole_mib}MiB", "workspace": f"{WORKSPACE_BYTES // MEBIBYTE}MiB"},
    }
