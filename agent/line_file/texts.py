"""Texts section: memory for keys and values, quanta, deadlines, and routes to language models."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated

from pydantic import AfterValidator, Field

from agent.line_file.values import OptionalSize, RegularExpression, Seconds
from experts.document import suggestion
from experts.graph import TextRoute, TextRule
from experts.sections.experts import is_llm
from experts.sections.values import COMPONENT, Section

if TYPE_CHECKING:
    from collections.abc import Iterator

    from experts.document import Document, KeyPath
    from experts.errors import ConfigError
    from experts.sections.experts import CatalogSections


def _route_name(text: str) -> str:
    """A route's name has no slash, an expert's has one."""
    if not COMPONENT.fullmatch(text):
        raise ValueError(
            f"{text!r} is not a route name - use letters, digits, `_`, `.`, `+` and `-`, a letter or digit first"
        )
    return text


RouteName = Annotated[str, AfterValidator(_route_name)]


class TextRuleSection(Section):
    """Rule that sends matching texts to an expert."""

    matches: RegularExpression = Field(
        min_length=1, description="regular expression to find in a text; (?i) ignores case"
    )
    expert: str = Field(description="id of the llm that answers")


class TextRouteSection(Section):
    """One name that texts may be sent to."""

    rules: tuple[TextRuleSection, ...] = Field((), description="the first that matches a text names its expert")
    router: str | None = Field(None, description="id of an llm with labels, for other texts")
    experts: dict[str, str] = Field({}, description="router's label -> id of the llm that answers")
    otherwise: str | None = Field(None, description="id of the llm for all other texts; required if there can be any")


QUANTUM_S, LONE_QUANTUM_S = 0.05, 0.2  # with and without experts of images; new texts join after any iteration


class TextsSection(Section):
    """Texts for language models."""

    kv: OptionalSize = Field(
        None,
        description="memory for keys and values of texts, in each memory that language models run from: "
        "auto (a quarter of it) or a size (1GiB)",
    )
    quantum_s: Annotated[float, Field(strict=True, ge=0.001, le=10.0)] | None = Field(
        None,
        description="longest time that texts keep an executor while images wait, seconds, 0.001 to 10; "
        f"default {QUANTUM_S:g}, and {LONE_QUANTUM_S:g} where no expert takes images",
    )
    deadline_s: Seconds | None = Field(None, description="seconds after which an unfinished text ends")
    prefix_cache: bool = Field(True, strict=True, description="false: compute a common beginning for each text")
    routes: dict[RouteName, TextRouteSection] = Field({}, description="names that texts may name, beside experts")


def text_routes_of(texts: TextsSection, sections: CatalogSections) -> dict[str, TextRoute]:
    """Routes of a section that has no ``text_problems``."""
    return {name: _route(name, section, sections) for name, section in texts.routes.items()}


def text_problems(texts: TextsSection, sections: CatalogSections, document: Document) -> Iterator[ConfigError]:
    """Problems across keys: routes against experts, and names against routes of images."""
    if document.values.get("texts") and not any(is_llm(section) for section in sections.experts.values()):
        yield document.error("no expert takes texts - add one of architecture: llm, or leave texts out", "texts")
    for name, section in texts.routes.items():
        where = ("texts", "routes", name)
        if name in sections.routes:
            yield document.error("is a route of images, too - give it another name", *where)
        answerers: list[tuple[str, KeyPath]]
        answerers = [(rule.expert, ("rules", index, "expert")) for index, rule in enumerate(section.rules)]
        answerers += [(expert, ("experts", label)) for label, expert in section.experts.items()]
        answerers += [] if section.otherwise is None else [(section.otherwise, ("otherwise",))]
        for expert, place in answerers:
            if (problem := _answerer_problem(expert, sections)) is not None:
                yield document.error(problem, *where, *place)
        yield from _router_problems(section, sections, document, where)


def _route(name: str, section: TextRouteSection, sections: CatalogSections) -> TextRoute:
    labels = () if section.router is None else sections.experts[section.router].words or ()
    return TextRoute(
        name=name,
        rules=tuple(TextRule(re.compile(rule.matches), rule.expert) for rule in section.rules),
        router=section.router,
        branches={label: section.experts.get(label) or section.otherwise or "" for label in labels},
        otherwise=section.otherwise,
    )


def _router_problems(
    section: TextRouteSection, sections: CatalogSections, document: Document, where: KeyPath
) -> Iterator[ConfigError]:
    """Without ``otherwise``, every label of a router needs an expert, and so does a text that no rule matches."""
    if section.router is None:
        if section.experts:
            yield document.error("its labels need a router - add router:", *where, "experts")
        if section.otherwise is None:
            yield document.error("no expert answers what no rule matches - add otherwise:, or a router:", *where)
        return
    if (problem := _not_an_llm(section.router, sections)) is not None:
        yield document.error(problem, *where, "router")
        return
    labels = sections.experts[section.router].words or ()
    if not labels:
        yield document.error(f"{section.router} has no labels to answer with - give it some", *where, "router")
        return
    for label in section.experts:
        if label not in labels:
            hint = suggestion(label, labels)
            yield document.error(f"{section.router} has no label {label!r} - {hint}", *where, "experts", label)
    left = [label for label in labels if label not in section.experts]
    if left and section.otherwise is None:
        listed = ", ".join(left)
        yield document.error(f"no expert answers for {listed} - add each to experts:, or add otherwise:", *where)


def _answerer_problem(name: str, sections: CatalogSections) -> str | None:
    """An expert with labels answers with a label only, so it cannot end a route."""
    problem = _not_an_llm(name, sections)
    if problem is None and sections.experts[name].words:
        return (
            f"{name} answers with its labels, not with texts - name another expert; one with the same weights and no "
            "labels takes no extra memory"
        )
    return problem


def _not_an_llm(name: str, sections: CatalogSections) -> str | None:
    expert = sections.experts.get(name)
    llms = [each for each, section in sections.experts.items() if is_llm(section)]
    if expert is None:
        return f"no expert {name!r} - {suggestion(name, llms, 'add it under `experts`')}"
    if not is_llm(expert):
        return f"{name} takes images, not texts - {suggestion(name, llms, 'name an llm')}"
    return None
