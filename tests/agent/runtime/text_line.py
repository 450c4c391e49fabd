"""A line of tiny language models beside a classifier: packed once, served by an agent, and asked directly."""

from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from unittest.mock import patch

import torch
from safetensors.torch import save_file
from torchvision import models

from agent.core.engine import EngineSetup
from agent.core.performance import SSD, ExecutorSpec, ExpertProfile, Performance, PerformanceMatrix, PoolSpec
from agent.runtime.assembly import assemble
from agent.runtime.loop import AgentPlan, LoopOptions
from agent.runtime.machine.detection import detect
from agent.runtime.texts import TextSource
from experts.expert import Expert, InputSpec
from experts.graph import ExpertGraph, RouteStep
from experts.llm.arenas.key_values import KvLayout
from experts.llm.files.config import parse_spec
from experts.llm.model import load_model
from experts.llm.serving.generation import GREEDY, TextRequest
from experts.packed.weights import SegmentStore
from tests.agent.core import worlds
from tests.agent.runtime.conftest import Served, copies_of
from tests.experts.llm.conftest import ModelFiles, greedy, tiny_config

CONFIG = tiny_config("llama", hidden_size=64, intermediate_size=768, num_hidden_layers=2)
LANGUAGE = ("llm/router", "llm/code", "llm/maths", "llm/manuals")  # manuals is code with another head
HEAD = "lm_head.weight"
EYE = "cls/eye"
LABELS = ("ok", "missing", "tombstone")
CHOICES = {"code": (7, 8), "maths": (9,)}
PATIENCE_S = 60.0
WORKSPACE_BYTES = 64 * 1024 * 1024
IMAGES = Performance(K_s=0.004, B_s=0.002, max_batch=4, workspace_bytes=4 * 1024 * 1024)


def write_line(folder):
    experts = []
    files = ModelFiles(folder)
    for seed, name in enumerate(LANGUAGE):
        tensors = files.tensors(CONFIG, seed=seed)
        if name == "llm/manuals":
            tensors = files.tensors(CONFIG, seed=LANGUAGE.index("llm/code")) | {HEAD: tensors[HEAD]}
        directory = files.write(CONFIG, tensors).rename(folder / name.replace("/", "-"))
        experts.append(Expert(name, "llm", directory, tuple(CHOICES) if name == LANGUAGE[0] else (), None))
    torch.manual_seed(0)
    save_file(models.squeezenet1_1(num_classes=len(LABELS)).state_dict(), folder / "eye.safetensors")
    experts.append(Expert(EYE, "squeezenet1_1", folder / "eye.safetensors", LABELS, InputSpec(64, 64)))
    return experts


@dataclass(frozen=True)
class TextLine:
    segments: SegmentStore
    copies: dict
    models: dict = field(default_factory=dict)  # without the runtime, those that were asked

    @classmethod
    def packed(cls, folder, experts):
        segments = SegmentStore(folder / "packed")
        return cls(segments, copies_of(experts, segments))

    def copy(self, expert):
        return self.copies[f"{expert}@fp32"]

    def graph(self):
        routes = {
            "auto": (RouteStep("llm/router", frozenset(), then={"code": "llm/code", "maths": "llm/maths"}),),
            "eye": (RouteStep(EYE, frozenset(LABELS)),),
        }
        return ExpertGraph([*LANGUAGE, EYE], routes)

    def greedy(self, expert, prompt, count):
        if expert not in self.models:
            self.models[expert] = load_model(self.copy(expert).expert.weights, expert)
        return greedy(self.models[expert], [prompt], count)[0][0]


class TextAgent(Served):
    """An agent over a text line. ``engines``: what stands in the place of the engines; None for real ones.

    ``times``: factor of each processor's times; ``room``: of each memory, in largest experts."""

    def __init__(
        self, line, *, engines=None, processors=("cpu",), lease_tokens=400, family=None, times=None, room=4, **options
    ):
        self.line, self.outcomes, self.family = line, {}, family
        times = times or {}
        spec = parse_spec(CONFIG, "tiny")
        self.texts = Performance(
            0.001, 0.002, 4, 1024 * 1024, K_prompt_s=1e-5, K_output_s=1e-3,
            lease_bytes=KvLayout.of(spec, torch.float32).token_bytes,
        )  # fmt: skip
        box = replace(detect("emulated" if "emulated" in processors else "cpu"), cores=1)
        pool_of = {"emulated": "device"}.get
        specs = [ExecutorSpec(*each, pool_of(each[1], "host")) for each in enumerate(processors)]
        largest = max(copy.footprint.total_bytes for copy in line.copies.values())
        pool = PoolSpec("host", room * largest, WORKSPACE_BYTES, lease_bytes=lease_tokens * self.texts.lease_bytes)
        pools = (pool, replace(pool, name="device", cache="host", is_one_piece=True))[: len(box.pools)]
        limits = worlds.limits(pools, load_backoff_s=0.001, quantum_s=0.02)
        rows = {spec.processor: dict(self._rows(times.get(spec.processor, 1))) for spec in specs}
        graph, matrix = line.graph(), PerformanceMatrix(rows)
        setup = EngineSetup(graph, "coserve", tuple(specs), matrix, limits)
        plan = AgentPlan(box, setup, line.copies)
        told = self.outcomes.__setitem__
        with patch("agent.runtime.assembly.text_engines", lambda *_, **__: engines) if engines else nullcontext():
            self.loop = assemble(
                setup.engine(), plan, line.segments, told, LoopOptions(checks_invariants=True, **options)
            )

    def _rows(self, factor):
        for copy in self.line.copies.values():
            performance, family = (self.texts, self.family) if copy.expert.id in LANGUAGE else (IMAGES, None)
            performance = replace(performance, K_s=performance.K_s * factor, B_s=performance.B_s * factor)
            loads = {SSD: 0.01, "host": 0.001}
            yield copy.expert.id, ExpertProfile(copy.name, performance, copy.footprint, loads, family)

    def ask(self, expert, prompt=(1, 2, 3), count=5):
        reader = Reader()
        return self.loop.submit(source(prompt, count, reader), expert=expert), reader


@dataclass
class Reader:
    tokens: list = field(default_factory=list)

    def write(self, sampled):
        self.tokens.append(sampled.id)
        return False


def source(prompt, count, reader):
    """One text for every expert; a router is asked to choose."""

    def text_for(expert):
        choices = CHOICES if expert == "llm/router" else None
        return TextRequest(tuple(prompt), count, GREEDY, reader, choices=choices)

    return TextSource(text_for)
