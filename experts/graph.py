"""Routes: component -> preliminary expert -> subsequent experts, and the dependencies between them.

A route may branch in its last step: a router's label picks the expert that ends the route with any answer.

Guarantees: the graph of dependencies has no cycle, and every step names an expert of the line (the catalog checks both
first, the constructor checks cycles again). The graph is immutable, and queries take O(1). Every text has a
destination; rules are deterministic.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from typing import TYPE_CHECKING

from experts.expert import NOTHING_FOUND, Prediction, Verdict

if TYPE_CHECKING:
    import re
    from collections.abc import Iterable, Mapping


@dataclass(frozen=True, slots=True)
class RouteStep:
    """Step of a route: one expert. A label outside ``passing``, or a score below ``min_score``, ends the route: NG.

    ``then``, in a route's last step only: label -> the expert that ends the route. Such a label passes.
    """

    expert: str
    passing: frozenset[str]
    min_score: float = 0.0
    then: Mapping[str, str] = field(default_factory=dict)

    @property
    def going_on(self) -> frozenset[str]:
        return self.passing | self.then.keys() if self.then else self.passing

    def renamed(self, names: Mapping[str, str]) -> RouteStep:
        then = {label: names[expert] for label, expert in self.then.items()}
        return RouteStep(names[self.expert], self.passing, self.min_score, then)


@dataclass(frozen=True, slots=True)
class Judgement:
    """Consequence of a step's prediction: exactly one of the next expert and a verdict."""

    label: str
    score: float
    next_expert: str | None
    verdict: Verdict | None


class ExpertGraph:
    """The routes of one line. ``routes`` maps a component type to its steps, in order, at least one.

    ``shadows``: expert -> its shadow, which gets the same images, decides nothing and is on no route. Raises ValueError
    for a route without a step, a branch before the last step, experts in a circle, and a shadow that is on a route,
    shared by two experts, or unknown.
    """

    def __init__(
        self,
        experts: Iterable[str],
        routes: Mapping[str, tuple[RouteStep, ...]],
        shadows: Mapping[str, str] | None = None,
    ) -> None:
        self.experts = frozenset(experts)
        self.shadows = dict(shadows or {})
        self.in_shadow = frozenset(self.shadows.values())
        self.routes = dict(routes)
        preliminaries: dict[str, set[str]] = {expert: set() for expert in self.experts}
        subsequents: dict[str, set[str]] = {expert: set() for expert in self.experts}
        for component, steps in self.routes.items():
            if not steps:
                raise ValueError(f"route {component} has no step")
            if any(step.then for step in steps[:-1]):
                raise ValueError(f"route {component} branches before its last step")
            pairs = [(step.expert, following.expert) for step, following in itertools.pairwise(steps)]
            for expert, following in (*pairs, *((steps[-1].expert, branch) for branch in steps[-1].then.values())):
                preliminaries[following].add(expert)
                subsequents[expert].add(following)
        self._refuse_shadows()
        cycle = find_cycle(preliminaries)
        if cycle:
            raise ValueError(f"experts depend on one another in a circle: {' -> '.join(cycle)}")
        self._preliminaries = {expert: frozenset(names) for expert, names in preliminaries.items()}
        self._subsequents = {expert: tuple(sorted(names)) for expert, names in subsequents.items()}

    def _refuse_shadows(self) -> None:
        asked = frozenset(name for component in self.routes for name in self.experts_of(component))
        for expert, shadow in self.shadows.items():
            if shadow not in self.experts or expert not in self.experts:
                raise ValueError(f"{expert} and its shadow {shadow} are not both experts")
            if shadow in asked or shadow in self.shadows:
                raise ValueError(f"{shadow}, the shadow of {expert}, is on a route or has a shadow itself")
        if len(self.in_shadow) < len(self.shadows):
            raise ValueError("an expert is the shadow of two")

    @property
    def placed(self) -> frozenset[str]:
        """Experts worth having in memory before a request names them: all but shadows."""
        return self.experts - self.in_shadow

    def first_expert(self, component: str) -> str | None:
        steps = self.routes.get(component)
        return steps[0].expert if steps else None

    def experts_of(self, component: str) -> tuple[str, ...]:
        """Experts that a component's route may reach, in its order; none without a route."""
        steps = self.routes.get(component, ())
        return tuple(dict.fromkeys(expert for step in steps for expert in (step.expert, *step.then.values())))

    def experts_after(self, component: str, step: int) -> tuple[str, ...]:
        """Experts that a route may still reach after step number ``step`` (from 0), in its order."""
        steps = self.routes[component]
        following = (expert for each in steps[step + 1 :] for expert in (each.expert, *each.then.values()))
        branches = steps[-1].then.values() if step == len(steps) - 1 else ()
        return tuple(dict.fromkeys((*following, *branches)))

    def turns(self, component: str, expert: str) -> tuple[int, ...]:
        """Numbers of the steps at which a component's route may run an expert, as ``judge`` takes them."""
        steps = self.routes.get(component, ())
        found = tuple(number for number, step in enumerate(steps) if step.expert == expert)
        return (*found, len(steps)) if steps and expert in steps[-1].then.values() else found

    def preliminaries(self, expert: str) -> frozenset[str]:
        """Experts right before this one on some route."""
        return self._preliminaries[expert]

    def subsequents(self, expert: str) -> tuple[str, ...]:
        return self._subsequents[expert]

    def usage(
        self,
        shares: Mapping[str, float],
        pass_rates: Mapping[str, float],
        label_rates: Mapping[str, Mapping[str, float]] | None = None,
    ) -> dict[str, float]:
        """Probability of each expert that these components' routes reach to be used (CoServe, section 4.5).

        ``shares``: probability of each component. A subsequent expert is used as often as those before it let a request
        pass: at their ``pass_rates`` (0 to 1), else always. Where a route branches, ``label_rates`` gives the share (0
        to 1) of each label of a router among what passed; else all are equal.
        """
        usage: dict[str, float] = {}
        for component, share in shares.items():
            for step in self.routes[component]:
                usage[step.expert] = usage.get(step.expert, 0.0) + share
                share *= pass_rates.get(step.expert, 1.0)
                rates = (label_rates or {}).get(step.expert)
                for label, expert in step.then.items():
                    rate = 1 / len(step.then) if rates is None else rates.get(label, 0.0)
                    usage[expert] = usage.get(expert, 0.0) + share * rate
        return usage

    def judge(self, component: str, step: int, prediction: Prediction) -> Judgement:
        """Next expert or verdict after step number ``step`` (from 0) predicted this.

        The step behind the last one of a route that branches is the expert that a label picked.
        """
        steps = self.routes[component]
        if step == len(steps) and steps[-1].then:
            return Judgement(prediction.label, prediction.score, next_expert=None, verdict=Verdict.OK)
        asked = steps[step]
        label, score = deciding_label(prediction, asked.going_on)
        if label not in asked.going_on or score < asked.min_score:
            return Judgement(label, score, next_expert=None, verdict=Verdict.NG)
        following = asked.then.get(label) or (steps[step + 1].expert if step + 1 < len(steps) else None)
        return Judgement(label, score, following, Verdict.OK if following is None else None)


def deciding_label(prediction: Prediction, passing: frozenset[str]) -> tuple[str, float]:
    """Deciding label and its score: a box that does not pass outweighs any number of boxes that do."""
    if prediction.outputs:
        return _deciding_output(prediction, passing)
    failing = [box for box in prediction.boxes if box.label not in passing]
    if failing:
        worst = max(failing, key=lambda box: box.score)
        return worst.label, worst.score
    return prediction.label or NOTHING_FOUND, prediction.score


def _deciding_output(prediction: Prediction, passing: frozenset[str]) -> tuple[str, float]:
    """Deciding label and score of a multilabel expert.

    The first of these decides: a label outside ``passing`` that holds; a label in ``passing`` that does not hold,
    unless ``otherwise`` passes. Else the image passes, with the score of its least certain output.
    """
    failing = [output for output in prediction.outputs if output.label not in passing]
    if holding := [output for output in failing if output.holds]:
        worst = max(holding, key=lambda output: output.score)
        return worst.label, worst.score
    needed = [] if prediction.otherwise in passing else [each for each in prediction.outputs if each.label in passing]
    if lacking := [1 - output.score for output in needed if not output.holds]:
        return prediction.otherwise, max(lacking)
    certainties = [*(output.score for output in needed), *(1 - output.score for output in failing)]
    return prediction.label, min(certainties, default=prediction.score)


def find_cycle(preliminaries: Mapping[str, Iterable[str]]) -> tuple[str, ...]:
    """Experts of one circle of dependencies, the first repeated at the end; empty without a circle."""
    try:
        TopologicalSorter(preliminaries).prepare()
    except CycleError as error:
        return tuple(reversed(error.args[1]))
    return ()


# routes of texts: a rule names the expert, else the router picks one

SEARCHED_CHARACTERS = 16_384  # of a text, by rules


@dataclass(frozen=True, slots=True)
class TextRule:
    """Rule: texts that ``matches`` finds go to this expert."""

    matches: re.Pattern[str]
    expert: str


@dataclass(frozen=True, slots=True)
class TextRoute:
    """Route of texts. ``branches``: router's label -> expert.

    ``otherwise``: expert for texts without a matching rule; never None without a router.
    """

    name: str
    rules: tuple[TextRule, ...]
    router: str | None
    branches: Mapping[str, str]
    otherwise: str | None

    def expert_for(self, text: str) -> str | None:
        """Expert of the first matching rule, else ``otherwise``; None: the router decides.

        Rules search the first ``SEARCHED_CHARACTERS``: a search keeps every other thread waiting.
        """
        for rule in self.rules:
            if rule.matches.search(text[:SEARCHED_CHARACTERS]):
                return rule.expert
        return None if self.router is not None else self.otherwise

    @property
    def experts(self) -> tuple[str, ...]:
        """Experts that may answer a text of this route, and the router; each once."""
        named = [*(rule.expert for rule in self.rules), self.router, *self.branches.values(), self.otherwise]
        return tuple(dict.fromkeys(name for name in named if name is not None))

    @property
    def steps(self) -> tuple[RouteStep, ...]:
        return () if self.router is None else (RouteStep(self.router, frozenset(), then=self.branches),)
