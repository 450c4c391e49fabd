"""Routes of texts: to the expert that a rule names, else to the one that the route's router picks.

Guarantees: every text has a destination, and rules always give the same text the same one. The line's graph holds a
router's labels, and the expert of each, as a branching route of the same name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from experts.graph import RouteStep

if TYPE_CHECKING:
    import re
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class TextRule:
    """Texts in which ``matches`` is found go to this expert."""

    matches: re.Pattern[str]
    expert: str


@dataclass(frozen=True, slots=True)
class TextRoute:
    """One name that texts may be sent to. ``branches``: of each of the router's labels, who answers then.

    ``otherwise`` answers what no rule matches where there is no router; then it is not None.
    """

    name: str
    rules: tuple[TextRule, ...]
    router: str | None
    branches: Mapping[str, str]
    otherwise: str | None

    def expert_for(self, text: str) -> str | None:
        """The expert that a rule, the first that matches, or ``otherwise`` names; None: the router has to be asked."""
        for rule in self.rules:
            if rule.matches.search(text):
                return rule.expert
        return None if self.router is not None else self.otherwise

    @property
    def experts(self) -> tuple[str, ...]:
        """Experts that may answer a text sent here, and the router; each once."""
        named = [*(rule.expert for rule in self.rules), self.router, *self.branches.values(), self.otherwise]
        return tuple(dict.fromkeys(name for name in named if name is not None))

    @property
    def steps(self) -> tuple[RouteStep, ...]:
        return () if self.router is None else (RouteStep(self.router, frozenset(), then=self.branches),)
