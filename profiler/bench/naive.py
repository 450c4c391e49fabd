"""General model server that CoServe is compared with, as users of torch write it.

The server runs requests in order, one image at a time; holds as many models as fit, counted by the largest; evicts the
least recently used one. A load builds the model by its constructor and fills it by ``load_state_dict(torch.load(file,
weights_only=True))``, in fp32. The file is not in the page cache, as a full edge box has no memory for it. The clock
starts with a full memory, as an agent's does after its initial placement.
"""

from __future__ import annotations

import os
import re
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from agent.runtime.machine.threads import use_threads
from agent.runtime.weights.drive import PacedLink
from experts.backends import backend_for, family
from experts.backends.torch_backend import TorchBackend
from experts.errors import OutputInvalid
from profiler.replay.host_load import CoresInUse, forget_peak_rss, peak_resident_bytes
from profiler.workload.generated_line import removed_afterwards, require_disk

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor
    from torch.nn import Module

    from agent.config import LineConfig
    from experts.backends.base import Prepared
    from experts.backends.forms.base import Reader
    from experts.expert import Expert, Prediction
    from experts.graph import ExpertGraph
    from profiler.workload.traces import TracedArrival

NAIVE = "naive"
FOLDED_FRACTION = 0.01  # of a model: statistics of norms, which packed experts have folded in; not held against it


@dataclass(frozen=True, slots=True)
class NaivePlayed:
    """A trace on the general model server. ``labels``: in its order, None where the output was NaN or infinity.

    ``others_fraction``: share of all cores, used by other processes. ``missing_bytes``: size of needed experts that
    were not resident at the start, each once; no server reads less.
    """

    seconds: float
    labels: tuple[str | None, ...]
    waits_s: tuple[float, ...]
    loads: int
    evictions: int
    bytes_read: int
    peak_rss_bytes: int
    others_fraction: float
    resident_at_start: frozenset[str]
    missing_bytes: int


@contextmanager
def naive_files(config: LineConfig, experts: Iterable[str]) -> Iterator[dict[str, Path]]:
    """The weights of these experts as ``torch.save`` writes them, by expert; removed afterwards.

    Raises ConfigError for an expert that is neither a classifier nor a detector, and when the disk has no room.
    """
    wanted = [config.catalog.experts[expert] for expert in sorted(set(experts))]
    for expert in wanted:
        if family(expert.architecture) not in {"classifier", "detector"}:
            raise config.document.error(
                f"the naive server runs torchvision classifiers and YOLO detectors, not {expert.architecture} - "
                "leave the naive policy out, or this expert's requests",
                "experts",
                expert.id,
            )
    config.state.mkdir(parents=True, exist_ok=True)
    needed_bytes = sum(expert.weights.stat().st_size for expert in wanted)
    require_disk(config.state, needed_bytes, f"copies of {len(wanted)} experts for the naive server")
    with removed_afterwards(config.state, "naive-") as folder:
        yield {expert.id: _saved(expert, folder / f"{number}.pt") for number, expert in enumerate(wanted)}


@dataclass(slots=True)
class NaiveServer:
    """General model server. ``expert_bytes``: memory for models. ``usage``: probabilities by expert."""

    experts: Mapping[str, Expert]
    graph: ExpertGraph
    files: Mapping[str, Path]
    expert_bytes: int
    usage: Mapping[str, float]
    device: str
    threads: int
    ssd_bytes_per_s: float | None = None
    _models: OrderedDict[str, PlainExpert] = field(default_factory=OrderedDict)
    _loaded: list[str] = field(default_factory=list)
    _evictions: int = 0

    @property
    def capacity(self) -> int:
        """Models that fit, each as large as the largest; at least one."""
        largest_bytes = max(file.stat().st_size for file in self.files.values())
        return max(int(self.expert_bytes / (largest_bytes * (1 - FOLDED_FRACTION))), 1)

    def play(self, trace: Sequence[TracedArrival], images: Sequence[NDArray[np.uint8]]) -> NaivePlayed:
        """Serve a trace, each request at its time or once those before it are done.

        Memory holds exactly the most used models when the clock starts.
        """
        with ThreadPoolExecutor(1, "naive", use_threads, (self.threads,)) as thread:
            return thread.submit(self._play, trace, images).result()

    def _play(self, trace: Sequence[TracedArrival], images: Sequence[NDArray[np.uint8]]) -> NaivePlayed:
        self._models.clear()
        most_used_first = sorted(self.files, key=lambda expert: (-self.usage.get(expert, 0.0), expert))
        for expert in reversed(most_used_first[: self.capacity]):
            self._model(expert, PacedLink(None))
        resident_at_start = frozenset(self._models)
        self._loaded.clear()
        self._evictions = 0
        link = PacedLink(self.ssd_bytes_per_s)
        forget_peak_rss()
        cores = CoresInUse()
        started_s = time.monotonic()
        labels, waits_s = [], []
        for arrival, image in zip(trace, images, strict=True):
            due_s = started_s + arrival.at_s
            time.sleep(max(due_s - time.monotonic(), 0.0))
            labels.append(self._label(arrival, image, link))
            waits_s.append(time.monotonic() - due_s)
        seconds, peak_rss_bytes = time.monotonic() - started_s, peak_resident_bytes()
        self._models.clear()
        return NaivePlayed(
            seconds=seconds,
            labels=tuple(labels),
            waits_s=tuple(waits_s),
            loads=len(self._loaded),
            evictions=self._evictions,
            bytes_read=sum(self.files[expert].stat().st_size for expert in self._loaded),
            peak_rss_bytes=peak_rss_bytes,
            others_fraction=cores.others_fraction(),
            resident_at_start=resident_at_start,
            missing_bytes=sum(self.files[expert].stat().st_size for expert in set(self._loaded) - resident_at_start),
        )

    def _label(self, arrival: TracedArrival, image: NDArray[np.uint8], link: PacedLink) -> str | None:
        try:
            if arrival.component is None:
                return self._predict(str(arrival.expert), image, link).label
            expert, step = self.graph.first_expert(arrival.component), 0
            while expert is not None:
                judged = self.graph.judge(arrival.component, step, self._predict(expert, image, link))
                expert, step = judged.next_expert, step + 1
        except OutputInvalid:
            return None
        return judged.label

    def _predict(self, expert: str, image: NDArray[np.uint8], link: PacedLink) -> Prediction:
        prepared = backend_for(self.experts[expert].architecture).prepare(self.experts[expert], image)
        return self._model(expert, link).infer([prepared], self.device)[0]

    def _model(self, expert: str, link: PacedLink) -> PlainExpert:
        if expert in self._models:
            self._models.move_to_end(expert)
            return self._models[expert]
        if len(self._models) >= self.capacity:
            self._models.popitem(last=False)
            self._evictions += 1
        file = self.files[expert]
        drop_from_cache(file)
        delivered_at_s = link.reserve(file.stat().st_size)
        model = plain_expert(self.experts[expert], torch.load(file, weights_only=True))
        model.module.to(self.device)
        time.sleep(max(delivered_at_s - time.monotonic(), 0.0))
        self._loaded.append(expert)
        self._models[expert] = model
        return model


def drop_from_cache(file: Path) -> None:
    """Drop a file's pages from the page cache, so that the next read comes from the disk. The file must be synced."""
    if hasattr(os, "posix_fadvise"):
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _saved(expert: Expert, path: Path) -> Path:
    from experts.backends.state_dict import fit
    from experts.backends.weight_files import read_state_dict

    model = build(expert)
    own, found = model.state_dict(), read_state_dict(expert)
    if family(expert.architecture) == "detector":  # exports differ in the number of "model." prefixes
        found = {f"model.{re.sub(r'^(model[.])+', '', name)}": tensor for name, tensor in found.items()}
    model.load_state_dict(fit(expert, {name: found[name] for name in own if name in found}, own), strict=False)
    with path.open("wb") as file:
        torch.save(model.state_dict(), file)
        file.flush()
        os.fsync(file.fileno())
    return path


@dataclass(frozen=True, slots=True)
class PlainExpert:
    """Expert as users of torch run it: a module in fp32, channels first, nothing folded, packed or converted.

    ``answered`` reads outputs as our forms do.
    """

    expert: Expert
    module: Module
    answered: Reader

    def infer(self, batch: Sequence[Prepared], device: str = "cpu") -> Sequence[Prediction]:
        """One prediction per image. Raises OutputInvalid for NaN or infinity."""
        with torch.inference_mode():
            output = self.module(torch.stack([prepared.tensor for prepared in batch]).to(device))
            outputs = (output,) if isinstance(output, torch.Tensor) else (output["boxes"], output["scores"])
            return self.answered(self.expert, [each.float().cpu() for each in outputs], batch)


def build(expert: Expert) -> Module:
    if family(expert.architecture) == "detector":
        from experts.backends.vision import detector

        return detector.build_trainable(expert.architecture, len(expert.labels))
    from experts.backends.vision import classifier

    return classifier.build_trainable(expert.architecture, len(expert.labels), expert.stem, expert.pixels.height)


def plain_expert(expert: Expert, weights: Mapping[str, Tensor], *, strict: bool = True) -> PlainExpert:
    backend = backend_for(expert.architecture)
    assert isinstance(backend, TorchBackend), "asked for torch's architectures"
    module = build(expert)
    module.load_state_dict(weights, strict=strict)
    module.eval()
    if family(expert.architecture) == "detector":
        module.model[-1].training = True  # of the head alone: it answers with its raw outputs, as ours do
    return PlainExpert(expert, module, backend.reader(expert))
