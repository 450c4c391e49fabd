"""Rewrites a fused graph so that convolutions and linear layers compute in eight bits.

A call reads levels (``levels``), and answers with levels where levels are read, else in float32. Operators that only
move values (max pooling, joining, splitting, enlarging) pass levels on; values that meet there share one scale. The
last layers stay in float32, as eight bits would make outputs coarse; so do layers of a single pixel, which cost little.

Guarantees: outputs differ from the fused graph's by rounding alone while values stay in their ranges. Storage that is
written to stays in float32, except for sums in place.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from experts.backends.onednn.fusion import Fused, FusedCall, apply
from experts.backends.onednn.layouts import ConvolutionShape
from experts.backends.onednn.levels import MIDDLE, Quantisation, Values, pooled_levels, to_levels, to_values

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from torch.fx import Graph, Node

    from experts.backends.onednn.fusion import Part
    from experts.backends.onednn.layouts import Shape

CONVOLVED_ACTIVATIONS = frozenset({"none", "relu", "hardtanh", "hardswish", "swish"})  # oneDNN's in eight bits
MULTIPLIED_ACTIVATIONS = frozenset({"none", "relu", "gelu"})
COMPUTING = frozenset({apply, functional.linear, torch.conv2d, torch.matmul})
MOVING_FUNCTIONS = frozenset({torch.cat, torch.chunk, torch.split, torch.flatten, operator.getitem})
MOVING_METHODS = frozenset({"chunk", "split", "view", "reshape", "flatten", "contiguous", "permute", "transpose"})


def quantised(fused: Fused) -> Fused:
    """Put every call that allows it into eight bits. Changes the given graph."""
    _, *placeholders = (node for node in fused.graph.nodes if node.op == "placeholder")
    parts = dict(zip(placeholders, fused.inputs, strict=True))
    rewriting = _Rewriting(fused.graph, parts, _planned(fused.graph, parts))
    rewriting.run()
    _, *placeholders = (node for node in fused.graph.nodes if node.op == "placeholder")
    return Fused(fused.graph, tuple(parts[node] for node in placeholders))


@dataclass
class _Plan:
    calls: dict[Node, FusedCall]  # in eight bits
    levelled: set[Node]  # nodes whose values are levels
    values: dict[Node, Values] = field(default_factory=dict)


def _planned(graph: Graph, parts: Mapping[Node, Part]) -> _Plan:
    written = _written(graph)
    calls: dict[Node, FusedCall] = {}
    for node in graph.nodes:
        call = parts.get(node.args[0]) if node.target is apply else None
        if isinstance(call, FusedCall) and _is_able(call) and _leads_on(node) and not written & {_storage(node)}:
            calls[node] = call
    plan = _Plan(calls, _levelled(graph, calls, written))
    plan.values.update(_shared_values(graph, plan))
    return plan


def _is_able(call: FusedCall) -> bool:
    shape = call.shape
    if not isinstance(shape, ConvolutionShape):
        return call.owns_weight and call.activation.name in MULTIPLIED_ACTIVATIONS
    is_large = shape.height * shape.width > 1
    return is_large and call.owns_weight and call.activation.name in CONVOLVED_ACTIVATIONS


def _leads_on(node: Node) -> bool:
    """True where another layer reads this one's answer, directly or through other nodes."""
    reached, waiting = {node}, [node]
    while waiting:
        for user in waiting.pop().users:
            if user.target in COMPUTING:
                return True
            if user not in reached:
                reached.add(user)
                waiting.append(user)
    return False


def _written(graph: Graph) -> set[int]:
    """Storages that are written to, except by sums in place after the last reader."""
    return {storage for node in graph.nodes if node.target is not apply for storage in node.meta.get("writes", ())}


def _storage(node: Node) -> int | None:
    storage: int | None = node.meta.get("storage")
    return storage


def _levelled(graph: Graph, calls: Mapping[Node, FusedCall], written: set[int]) -> set[Node]:
    """Nodes whose values are levels: needed and made as levels."""
    moving = {node for node in graph.nodes if _moves(node) and _storage(node) not in written}
    while True:
        needed = _needed_as_levels(graph, calls, moving)
        made = {node for node in calls if node in needed or calls[node].adds}
        for node in graph.nodes:
            is_wanted = node in moving and (node in needed or node.target is operator.getitem)  # of parts, all or none
            are_read = (each in made for each in node.all_input_nodes)
            if is_wanted and (any(are_read) if node.target is torch.cat else all(are_read)):
                made.add(node)
        if moving <= made:
            return made
        moving &= made


def _needed_as_levels(graph: Graph, calls: Mapping[Node, FusedCall], moving: set[Node]) -> set[Node]:
    needed: set[Node] = set()
    for node in reversed(graph.nodes):
        for user in node.users:
            if user in calls or (user in moving and user in needed):
                needed.add(node)
    return needed


def _moves(node: Node) -> bool:
    """True where a node turns levels into levels of the same scale."""
    if node.target is functional.interpolate:
        return _argument(node, 3, "mode", "nearest") == "nearest"
    if node.target is functional.max_pool2d:
        return not _argument(node, 6, "return_indices", False)
    if node.target is functional.dropout:
        return not _argument(node, 2, "training", True)
    return node.target in (MOVING_METHODS if node.op == "call_method" else MOVING_FUNCTIONS)


def _argument(node: Node, place: int, name: str, default: object) -> object:
    return node.args[place] if len(node.args) > place else node.kwargs.get(name, default)


def _shared_values(graph: Graph, plan: _Plan) -> Iterator[tuple[Node, Values]]:
    """Values of each node that is levels, or is read as levels."""
    leaders: dict[Node, Node] = {}

    def leader(node: Node) -> Node:
        while leaders.setdefault(node, node) is not node:
            node = leaders[node]
        return node

    summed: set[Node] = set()
    for node in graph.nodes:
        if node in plan.calls:
            _, *operands = node.args
            summed.update(operands[1:])
            for read in operands:
                leader(read)
        if node in plan.levelled:
            leader(node)
            if node not in plan.calls:
                for each in node.all_input_nodes:
                    leaders[leader(each)] = leader(node)
    groups: defaultdict[Node, list[Node]] = defaultdict(list)
    for node in leaders:
        groups[leader(node)].append(node)
    for row, members in enumerate(groups.values()):
        values = Values(row, _zero(members, plan, summed))
        yield from ((node, values) for node in members)


def _zero(members: Iterable[Node], plan: _Plan, summed: set[Node]) -> int | None:
    """0 for values that are never negative; of a summand MIDDLE, as oneDNN compiles its zero into the call."""
    made = [node for node in members if not (node in plan.levelled and node not in plan.calls)]
    if all(node in plan.levelled and _is_never_negative(plan.calls[node]) for node in made):
        return 0
    return MIDDLE if summed & set(members) else None


def _is_never_negative(call: FusedCall) -> bool:
    activation = call.activation
    return activation.name == "relu" or (activation.name == "hardtanh" and activation.scalars[0] >= 0)


class _Rewriting:
    def __init__(self, graph: Graph, parts: dict[Node, Part], plan: _Plan) -> None:
        self._graph = graph
        self._parts = parts
        self._plan = plan
        self._written = _written(graph)
        self._steps: dict[tuple[Node, bool], Node] = {}  # conversions to levels, or back, that exist already
        self._placeholders: dict[Values, Node] = {}

    def run(self) -> None:
        for node in list(self._graph.nodes):
            if node in self._plan.calls:
                self._rewrite_call(node)
            elif node not in self._plan.levelled:
                for read in node.all_input_nodes:
                    if read in self._plan.levelled:
                        node.replace_input_with(read, self._converted(read, node, to_values))
            elif node.target is functional.max_pool2d:
                node.target = pooled_levels
            elif node.target is torch.cat:  # joined as levels: fewer bytes, and no conversion back
                for read in node.all_input_nodes:
                    if read not in self._plan.levelled:
                        node.replace_input_with(read, self._converted(read, node, to_levels))
        self._graph.lint()

    def _rewrite_call(self, node: Node) -> None:
        call, values = self._plan.calls[node], self._plan.values
        placeholder, *operands = node.args
        summand = operands[1] if call.adds else None
        answer = values[node] if node in self._plan.levelled else None
        quantisation = Quantisation(values[operands[0]], answer, None if summand is None else values[summand])
        overwrites = call.overwrites or (summand is not None and summand not in self._plan.levelled)
        shape = _shape(call, quantisation)
        self._parts[placeholder] = replace(call, shape=shape, overwrites=overwrites, quantisation=quantisation)
        read = [
            each if each in self._plan.levelled else self._converted(each, node, to_levels, is_own=each is summand)
            for each in operands
        ]
        node.args = (placeholder, *read)

    def _converted(self, read: Node, reader: Node, step: object, *, is_own: bool = False) -> Node:
        """Convert a value for its reader: once for all readers, unless this reader or another node writes to it."""
        key = (read, step is to_levels)
        if key in self._steps and not is_own:
            return self._steps[key]
        place = self._placeholder(self._plan.values[read])
        with self._graph.inserting_before(reader):
            made = self._graph.call_function(step, (place, read))
        if not is_own and _storage(read) not in self._written:
            self._steps[key] = made
        return made

    def _placeholder(self, values: Values) -> Node:
        if values not in self._placeholders:
            last = [node for node in self._graph.nodes if node.op == "placeholder"][-1]
            with self._graph.inserting_after(last):
                made = self._graph.placeholder(f"values_{values.row}")
            self._placeholders[values] = made
            self._parts[made] = values
        return self._placeholders[values]


def _shape(call: FusedCall, quantisation: Quantisation) -> Shape:
    """Shape that a weight of eight bits is applied to: where zero is not level 0, images are padded in advance."""
    shape = replace(call.shape, dtype=torch.int8)
    if not isinstance(shape, ConvolutionShape) or quantisation.source.zero == 0:
        return shape
    height, width = (side + 2 * pad for side, pad in zip((shape.height, shape.width), shape.padding, strict=True))
    return replace(shape, padding=(0, 0), height=height, width=width)
