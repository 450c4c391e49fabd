"""Texts section: memory for keys and values, quanta, deadlines, and routes to language models."""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated

from pydantic import AfterValidator, Field

from agent.line_file.values import OptionalSize, RegularExpression, Seconds
from experts.catalog import COMPONENT, Section, is_llm
from experts.document import suggestion
from experts.graph import TextRoute, TextRule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from experts.catalog import CatalogSections, ExpertSection
    from experts.document import Document, KeyPath
    from experts.errors import ConfigError


def _route_name(text: str) -> str:
    """Without a slash: names of experts have one."""
    if not COMPONENT.fullmatch(text):
        raise ValueError(
            f"{text!r} is no name of a route - use letters, digits, `_`, `.`, `+` and `-`, a letter or digit first"
        )
    return text


RouteName = Annotated[str, AfterValidator(_route_name)]


class TextRuleSection(Section):
    """Rule that sends matching texts to an expert."""

    matches: RegularExpression = Field(
        min_length=1, description="regular expression that is found anywhere in what is asked; (?i) ignores case"
    )
    expert: str = Field(description="id of the llm that answers then")


class TextRouteSection(Section):
    """One name that texts may be sent to."""

    rules: tuple[TextRuleSection, ...] = Field(
        (), description="who answers texts that match; the first rule that does; default none"
    )
    router: str | None = Field(
        None, description="id of an llm with labels, asked with what no rule matches; default none"
    )
    experts: dict[str, str] = Field({}, description="router's label -> id of the llm that answers then; default none")
    otherwise: str | None = Field(
        None, description="id of the llm that answers what no rule and no label decides; required where that may happen"
    )


QUANTUM_S, LONE_QUANTUM_S = 0.05, 0.2  # beside images, and without: new texts join after an iteration anyway


class TextsSection(Section):
    """Texts, beside images."""

    kv: OptionalSize = Field(
        None,
        description="memory for keys and values of texts under way, of each memory that language models run from: "
        "auto (a quarter of it) or a size (1GiB); default auto",
    )
    quantum_s: Annotated[float, Field(strict=True, ge=0.001, le=10.0)] | None = Field(
        None,
        description="longest that texts keep an executor before images that wait may run, seconds, 0.001 to 10; "
        f"default {QUANTUM_S:g}, and {LONE_QUANTUM_S:g} where no expert takes images",
    )
    deadline_s: Seconds | None = Field(
        None, description="a text that is not answered in so many seconds ends there; default none"
    )
    prefix_cache: bool = Field(
        True, strict=True, description="false: beginnings that texts have in common are computed for each; default true"
    )
    routes: dict[RouteName, TextRouteSection] = Field(
        {}, description="names that texts may be sent to, beside those of experts; default none"
    )


def text_routes_of(texts: TextsSection, sections: CatalogSections) -> dict[str, TextRoute]:
    """Routes of a section without ``text_problems``."""
    return {name: _route(name, section, sections) for name, section in texts.routes.items()}


def text_problems(texts: TextsSection, sections: CatalogSections, document: Document) -> Iterator[ConfigError]:
    """Problems across keys: routes against experts, and names against routes of images."""
    if document.values.get("texts") and not any(is_llm(section) for section in sections.experts.values()):
        yield document.error("no expert takes texts - add one of architecture: llm, or leave texts out", "texts")
    for name, section in texts.routes.items():
        where = ("texts", "routes", name)
        if name in sections.routes:
            yield document.error("is a route of images, too - give it another name", *where)
        yield from _rule_problems(section, sections, document, where)
        yield from _router_problems(section, sections, document, where)
        if section.otherwise is not None:
            yield from _answerer_problems(section.otherwise, sections, document, *where, "otherwise")
        else:
            yield from _gap_problems(section, sections, document, where)


def _route(name: str, section: TextRouteSection, sections: CatalogSections) -> TextRoute:
    labels = () if section.router is None else sections.experts[section.router].labels or ()
    branches = {label: section.experts.get(label) or section.otherwise or "" for label in labels}
    return TextRoute(
        name=name,
        rules=tuple(TextRule(re.compile(rule.matches), rule.expert) for rule in section.rules),
        router=section.router,
        branches=MappingProxyType(branches),
        otherwise=section.otherwise,
    )


def _rule_problems(
    section: TextRouteSection, sections: CatalogSections, document: Document, where: KeyPath
) -> Iterator[ConfigError]:
    for index, rule in enumerate(section.rules):
        yield from _answerer_problems(rule.expert, sections, document, *where, "rules", index, "expert")


def _router_problems(
    section: TextRouteSection, sections: CatalogSections, document: Document, where: KeyPath
) -> Iterator[ConfigError]:
    for label, answerer in section.experts.items():
        yield from _answerer_problems(answerer, sections, document, *where, "experts", label)
    if section.router is None:
        if section.experts:
            yield document.error("whose labels are these? - add router:", *where, "experts")
        return
    router = sections.experts.get(section.router)
    problem = _problem_with(section.router, router, sections)
    if router is None or problem is not None:
        yield document.error(str(problem), *where, "router")
    elif not router.labels:
        yield document.error(f"{section.router} has no labels to answer with - give it some", *where, "router")
    else:
        for label in section.experts:
            if label not in router.labels:
                hint = suggestion(label, router.labels)
                yield document.error(f"{section.router} has no label {label!r} - {hint}", *where, "experts", label)


def _gap_problems(
    section: TextRouteSection, sections: CatalogSections, document: Document, where: KeyPath
) -> Iterator[ConfigError]:
    """Without ``otherwise``, every label of a router needs an expert."""
    if section.router is None:
        yield document.error("who answers what no rule matches? - add otherwise:, or a router:", *where)
        return
    router = sections.experts.get(section.router)
    left = [label for label in (router.labels or () if router else ()) if label not in section.experts]
    if left:
        listed = ", ".join(left)
        yield document.error(f"who answers for {listed}? - add that to experts:, or add otherwise:", *where)


def _answerer_problems(
    name: str, sections: CatalogSections, document: Document, *where: str | int
) -> Iterator[ConfigError]:
    """An expert with labels answers with one of these and nothing else."""
    expert = sections.experts.get(name)
    problem = _problem_with(name, expert, sections)
    if problem is not None:
        yield document.error(problem, *where)
    elif expert is not None and expert.labels:
        yield document.error(
            f"{name} answers with its labels, not with texts - name another one; one of the same weights and without "
            "labels takes no room of its own",
            *where,
        )


def _problem_with(name: str, expert: ExpertSection | None, sections: CatalogSections) -> str | None:
    llms = [each for each, section in sections.experts.items() if is_llm(section)]
    if expert is None:
        return f"no expert {name!r} - {suggestion(name, llms, 'add it under `experts`')}"
    if not is_llm(expert):
        return f"{name} takes images, not texts - {suggestion(name, llms, 'name an llm')}"
    return None
