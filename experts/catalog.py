"""The catalog: a line's experts and routes as read from YAML, built and hashed; see ``experts.sections``.

The disk is not checked: missing or broken weights quarantine their expert at run time and leave the others serving. An
ONNX file is opened once: its preprocessing facts are cached beside packed weights.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from experts.errors import ExpertError
from experts.expert import NOTHING_FOUND, Expert, Precision, Task
from experts.graph import ExpertGraph, RouteStep
from experts.packed.image_facts import KeptImageFacts
from experts.sections.experts import CatalogSections, ExpertSection, StepSection
from experts.sections.inputs import FitSection, input_spec

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from experts.document import Document
    from experts.graph import TextRoute


NO_TEXTS: Mapping[str, TextRoute] = MappingProxyType({})
AUTOMATIC = "auto"  # of a language model's precision


@dataclass(frozen=True, slots=True)
class Catalog:
    """The experts and routes of one line. ``sha256`` is that of the whole file's bytes.

    ``graph`` has the routes of images, and those of texts that ask a router.
    """

    experts: Mapping[str, Expert]
    graph: ExpertGraph
    sha256: str
    texts: Mapping[str, TextRoute] = field(default_factory=dict)

    @property
    def components(self) -> Mapping[str, tuple[RouteStep, ...]]:
        return {name: steps for name, steps in self.graph.routes.items() if name not in self.texts}


def build_catalog(
    sections: CatalogSections, document: Document, texts: Mapping[str, TextRoute] = NO_TEXTS, packed: Path | None = None
) -> Catalog:
    """Catalog of sections without ``catalog_problems``.

    ``texts``: routes of texts, by name. ``packed``: folder of packed weights, with cached facts of ONNX files.
    """
    facts = KeptImageFacts(packed)
    experts = {name: _expert(name, section, facts) for name, section in sections.experts.items()}
    routes = {
        component: tuple(_step(step, sections.experts[step.expert]) for step in steps)
        for component, steps in sections.routes.items()
    }
    routes |= {name: route.steps for name, route in texts.items() if route.steps}
    shadows = {name: section.shadow for name, section in sections.experts.items() if section.shadow is not None}
    graph = ExpertGraph(experts, routes, shadows)
    return Catalog(MappingProxyType(experts), graph, document.sha256, MappingProxyType({**texts}))


def _step(step: StepSection, expert: ExpertSection) -> RouteStep:
    passing = {*step.passing} | ({NOTHING_FOUND} if expert.nothing_found else set())
    return RouteStep(step.expert, frozenset(passing), step.min_score)


def expert_of(name: str, entry: Mapping[str, object], folder: Path) -> Expert:
    """An expert of one entry, without its line. Raises ValueError for values that no entry has."""
    section = ExpertSection.model_validate(entry, context={"folder": folder})
    return _expert(name, section, KeptImageFacts(None))


def _expert(name: str, section: ExpertSection, facts: KeptImageFacts) -> Expert:
    as_given = (
        "architecture",
        "weights",
        "pin",
        "stem",
        "variant",
        "threshold",
        "threshold_of",
        "confidence",
        "iou",
        "suppression",
        "check",
        "detector",
        "nothing_found",
        "adapter",
    )
    expert = Expert(
        id=name,
        labels=tuple(section.words or ()),
        names=section.names,
        input=None if section.input is None else input_spec(section.input, section.architecture),
        precision=None if section.precision in {None, AUTOMATIC} else Precision(section.precision),
        is_automatic=section.precision == AUTOMATIC,
        moe_cache_bytes=section.moe_cache,
        parallel=None if section.parallel is None else section.parallel.degrees,
        task=None if section.task is None else Task(section.task),
        thresholds=tuple(sorted(section.thresholds.items())),
        otherwise=section.otherwise or NOTHING_FOUND,
        **{key: getattr(section, key) for key in as_given},
    )
    return _fitted(expert, section, facts) if section.architecture == "onnx" and section.task is None else expert


def _fitted(expert: Expert, section: ExpertSection, facts: KeptImageFacts) -> Expert:
    """Apply the exporter's preprocessing; packing and ``config check`` report a broken file."""
    try:
        found = facts.of(expert)
        pixels = found.applied(expert.pixels)
    except ExpertError:
        return expert
    given = section.input
    if given is not None and given.normalize is None and (own := found.normalize) is not None:
        pixels = replace(pixels, normalize=own)
    if given is not None and given.fit is None and found.prepared:
        pixels = FitSection.model_validate(dict(found.prepared)).applied(pixels)
    if given is not None and given.orientation is not None:
        pixels = replace(pixels, orientation=given.orientation)
    return replace(expert, input=pixels)
