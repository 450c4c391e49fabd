"""LaterSteps: what an image may be needed for after the step that it is at, so that it is decoded once for all of them.

Found once for each component and step, and anew after a change of line.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agent.core.ahead import NOTHING_LATER, Later

if TYPE_CHECKING:
    from agent.core.ahead import PreparedAhead
    from agent.core.served_line import ServedLine
    from agent.core.ticket import Ticket
    from experts.graph import ExpertGraph


class LaterSteps:
    def __init__(self, ahead: PreparedAhead) -> None:
        self._ahead = ahead
        self._found: dict[tuple[str, int], Later] = {}  # (component, step) -> what may come after it
        self._line: ServedLine | None = None  # for which that was found

    def after(self, ticket: Ticket, line: ServedLine) -> Later:
        """What may come after the step that a request is at, as far as it may be held ready."""
        component, step = ticket.component, ticket.step
        if component is None:
            return NOTHING_LATER
        if ticket.graph is not line.graph:  # of an earlier line: few, and soon none
            return self._ahead.fitting(_forms_after(ticket.graph, component, step, line))
        if line is not self._line:
            self._found, self._line = {}, line
        if (component, step) not in self._found:
            self._found[component, step] = self._ahead.fitting(_forms_after(ticket.graph, component, step, line))
        return self._found[component, step]


def _forms_after(graph: ExpertGraph, component: str, step: int, line: ServedLine) -> Later:
    columns = line.matrix.experts.values()
    forms: dict[str, int] = {}
    experts: list[str] = []
    for expert in graph.experts_after(component, step):
        row = next((column[expert] for column in columns if expert in column), None)
        if row is not None and row.prepared is not None and row.prepared.name not in forms:
            forms[row.prepared.name] = row.prepared.size_bytes
            experts.append(expert)
    return Later(tuple(experts), forms, sum(forms.values())) if experts else NOTHING_LATER
