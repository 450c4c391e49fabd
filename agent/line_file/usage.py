"""Usage probabilities of experts and shares of components, by the quantities of a line's boards."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from agent.line_file.boards import BoardSection
    from experts.catalog import Catalog


def usage_probabilities(
    catalog: Catalog, boards: Mapping[str, BoardSection], pass_rates: Mapping[str, float] | None = None
) -> dict[str, float]:
    """Usage probability of each expert from the boards' quantities (CoServe, section 4.5); 0: unused. A component's
    share is its quantity over one board of each type; without boards all routes have equal shares. A route of texts
    counts as one more component. ``pass_rates`` as for ``ExpertGraph.usage``."""
    quantities = _quantities(catalog, boards) | dict.fromkeys(catalog.texts, 1)
    total = sum(quantities.values())
    used = dict.fromkeys(catalog.experts, 0.0)
    for name, quantity in quantities.items():
        for expert, share in _used_by(name, catalog, pass_rates or {}).items():
            used[expert] += share * quantity / total
    return used


def component_shares(catalog: Catalog, boards: Mapping[str, BoardSection]) -> dict[str, float]:
    """Share of each component's images: by quantity over one board of each type; without boards, equal shares."""
    quantities = _quantities(catalog, boards)
    total = sum(quantities.values())
    return {component: quantity / total for component, quantity in quantities.items()}


def _quantities(catalog: Catalog, boards: Mapping[str, BoardSection]) -> dict[str, int]:
    quantities: Counter[str] = Counter()
    for board in boards.values():
        quantities.update(board.quantities)
    return quantities or dict.fromkeys(catalog.components, 1)


def _used_by(route: str, catalog: Catalog, pass_rates: Mapping[str, float]) -> dict[str, float]:
    """Usage of each expert by one request of a route. A text's rules and their default are equally likely."""
    texts = catalog.texts.get(route)
    if texts is None:
        return catalog.graph.usage({route: 1.0}, pass_rates)
    ways = len(texts.rules) + 1
    used = catalog.graph.usage({route: 1 / ways}, pass_rates) if texts.steps else {}
    ends = [rule.expert for rule in texts.rules]
    if not texts.steps and texts.otherwise is not None:
        ends.append(texts.otherwise)
    for expert in ends:
        used[expert] = used.get(expert, 0.0) + 1 / ways
    return used
