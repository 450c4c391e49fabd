"""Problems between the experts and routes of a line file."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from experts.backends import family
from experts.document import Document, suggestion
from experts.expert import NOTHING_FOUND
from experts.graph import find_cycle
from experts.sections.experts import CatalogSections, ExpertSection, StepSection, is_llm

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from experts.errors import ConfigError


def catalog_problems(sections: CatalogSections, document: Document) -> Iterator[ConfigError]:
    """Problems between keys: routes of images against experts, shadows, and dependencies in a circle.

    A router of texts always comes first, so routes of texts form no circle.
    """
    if not sections.routes and any(not is_llm(section) for section in sections.experts.values()):
        meaning = CatalogSections.model_fields["routes"].description
        yield document.error(f"is missing - {meaning}", "routes")
    for component, steps in sections.routes.items():
        yield from _route_problems(component, steps, sections, document)
    yield from _shadow_problems(sections, document)
    yield from _cycle_problems(sections, document)


def _route_problems(
    component: str, steps: list[StepSection], sections: CatalogSections, document: Document
) -> Iterator[ConfigError]:
    first_steps: dict[str, int] = {}
    for index, step in enumerate(steps):
        where = ("routes", component, index)
        expert = sections.experts.get(step.expert)
        if expert is None:
            hint = suggestion(step.expert, sections.experts, "add it under `experts`")
            yield document.error(f"no expert {step.expert!r} - {hint}", *where, "expert")
            continue
        if step.expert in first_steps:
            again = f"{step.expert} is already step {first_steps[step.expert] + 1} of this route - remove one"
            yield document.error(again, *where, "expert")
        if is_llm(expert):
            yield document.error(f"{step.expert} takes texts, not images - name it in texts.routes", *where, "expert")
            continue
        first_steps.setdefault(step.expert, index)
        if expert.nothing_found and step.min_score > 0:
            reason = f"{step.expert} passes what has no box, and so no score - remove min_score"
            yield document.error(reason, *where, "min_score")
        for label in step.passing:
            may_find = family(expert.architecture) == "detector" or (expert.architecture == "onnx" and not expert.task)
            if label == NOTHING_FOUND and may_find:
                if not expert.nothing_found:
                    reason = f"{NOTHING_FOUND} passes only by `nothing_found: pass` of {step.expert} - write it there"
                    yield document.error(reason, *where, "pass")
            elif label not in (labels := [*(expert.words or ()), *([expert.otherwise] if expert.otherwise else ())]):
                hint = suggestion(label, labels)
                yield document.error(f"{step.expert} has no label {label!r} - {hint}", *where, "pass")


def _shadow_problems(sections: CatalogSections, document: Document) -> Iterator[ConfigError]:
    asked = {step.expert: component for component, steps in sections.routes.items() for step in steps}
    first: dict[str, str] = {}
    for name, section in sections.experts.items():
        if section.shadow is None:
            continue
        reason = _wrong_with_shadow(name, section, section.shadow, sections.experts)
        if reason is None and section.shadow in asked:
            reason = f"{section.shadow} is on route {asked[section.shadow]} - a shadow decides nothing: take it off"
        if reason is None and section.shadow in first:
            reason = f"{section.shadow} is the shadow of {first[section.shadow]} already - remove one"
        first.setdefault(section.shadow, name)
        if reason is not None:
            yield document.error(reason, "experts", name, "shadow")


def _wrong_with_shadow(
    name: str, section: ExpertSection, other: str, experts: Mapping[str, ExpertSection]
) -> str | None:
    """Reason why two experts cannot be compared on the same images."""
    shadow = experts.get(other)
    if shadow is None:
        return f"no expert {other!r} - {suggestion(other, experts, 'add it under `experts`')}"
    if other == name:
        return "an expert is not its own shadow - name another version of it"
    if is_llm(section) or is_llm(shadow):
        return "shadows are shown images, and llm takes texts - remove it"
    if shadow.shadow is not None:
        return f"{other} has a shadow itself - remove that one"
    if shadow.pin:
        return f"{other} is pinned, and nothing gives way to a shadow - remove its pin"
    if shadow.task != section.task:
        return f"{other} and {name} have different tasks - only the same task can be compared"
    if {*(shadow.words or ()), shadow.otherwise} != {*(section.words or ()), section.otherwise}:
        return f"{other} has the labels {shadow.words}, not {section.words} - only the same can be compared"
    return None


def _cycle_problems(sections: CatalogSections, document: Document) -> Iterator[ConfigError]:
    edges: dict[tuple[str, str], str] = {}
    preliminaries: dict[str, set[str]] = {}
    for component, steps in sections.routes.items():
        names = [step.expert for step in steps]
        if len(set(names)) < len(names):
            continue
        for before, after in pairwise(names):
            edges.setdefault((before, after), component)
            preliminaries.setdefault(after, set()).add(before)
    cycle = find_cycle(preliminaries)
    if not cycle:
        return
    turned = ((one, other) if (one, other) in edges else (other, one) for one, other in pairwise(cycle))
    routes = list(dict.fromkeys(edges[edge] for edge in turned))
    lines = ", ".join(f"{route} (line {document.place('routes', route).line})" for route in routes)
    found = f"experts depend on one another in a circle: {' -> '.join(cycle)}, by the routes {lines}"
    yield document.error(f"{found} - change the order in one", "routes", routes[0])
