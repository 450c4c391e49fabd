"""A module's forward pass as a graph, call by call, in which the number of images is open.

The module runs twice on the meta device, with two numbers of images, while this thread's torch calls are recorded. The
calls must match; a whole number that differs is a multiple of the number of images, plus a constant.

Guarantees: a recording does what the module did, in its order; anything else is Unrecordable, with the reason. Other
threads are not affected. (torch.fx's tracer replaces ``Module.__call__`` for the whole process, and stops at an ``if``
over a size.)
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_aggregate
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from experts.backends.modules.binding import output_list
from experts.backends.modules.compiler import compiler_left_out
from experts.errors import Unrecordable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor
    from torch.nn import Module

IMAGES = "images"
COUNTS = (2, 3)  # numbers of images; torch takes a size of one for fixed
META = torch.device("meta")
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class RecordedGraph:
    """A graph from images and weights, its placeholders, to the outputs.

    ``meta`` of a node: "shape", with COUNTS[0] images; "storage", equal for equal memory; "writes", changed storages.
    """

    graph: Graph
    weights: Mapping[str, str]  # names in the module, by the names of their placeholders


def recorded(module: Module, size: tuple[int, int], outputs: Sequence[str], dtype: torch.dtype) -> RecordedGraph:
    """``outputs``: see ``output_list``. Raises Unrecordable, and any error of the module."""
    one, other = (_run(module, size, dtype, count, outputs) for count in COUNTS)
    if len(other.graph.nodes) != len(one.graph.nodes):
        raise Unrecordable("it makes other calls for another number of images")
    _open_counts(one.graph, other.graph)
    return RecordedGraph(one.graph, one.weights)


def recorded_once(module: Module, size: tuple[int, int]) -> RecordedGraph:
    """The graph for COUNTS[0] images alone, with all tensors of the answer as outputs."""
    recorder = _run(module, size, torch.float32, COUNTS[0])
    return RecordedGraph(recorder.graph, recorder.weights)


def _run(
    module: Module, size: tuple[int, int], dtype: torch.dtype, count: int, outputs: Sequence[str] | None = None
) -> _Recorder:
    names: dict[int, str] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        names.setdefault(id(tensor), name)
    images = torch.empty((count, 3, *size), dtype=dtype, device=META)
    recorder = _Recorder(names, images.contiguous(memory_format=torch.channels_last))
    unfrozen = torch.inference_mode(mode=False)  # outside inference mode, versions count writes
    with compiler_left_out(), unfrozen, torch.no_grad(), recorder:
        answer = module(recorder.images)
    recorder.end(_tensors(answer) if outputs is None else output_list(answer, outputs))
    return recorder


@dataclass
class _Values:
    """Tensors of one run that have a node; kept alive, so that no later tensor gets the same id."""

    nodes: dict[int, Node] = field(default_factory=dict)
    kept: list[Tensor] = field(default_factory=list)
    storages: dict[int, int] = field(default_factory=dict)

    def put(self, tensor: Tensor, node: Node) -> None:
        self.nodes[id(tensor)] = node
        self.kept.append(tensor)
        node.meta["shape"] = tuple(tensor.shape)
        node.meta["storage"] = self.storage(tensor)

    def storage(self, tensor: Tensor) -> int:
        return self.storages.setdefault(tensor.untyped_storage()._cdata, len(self.storages))


class _Recorder(TorchFunctionMode):  # type: ignore[misc]  # torch is not followed by mypy here
    """Records the calls of one run in a graph. ``names``: names of the module's weights, by id."""

    def __init__(self, names: Mapping[int, str], images: Tensor) -> None:
        super().__init__()
        self.graph = Graph()
        self.images = images
        self.weights: dict[str, str] = {}
        self._names = names
        self._values = _Values()
        self._last_input = self.graph.placeholder(IMAGES)
        self._values.put(images, self._last_input)

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:  # noqa: ANN401  torch's own signature
        named = dict(kwargs or {})
        given = _tensors((args, named))
        versions = [_version(tensor) for tensor in given]
        result = _as_on_the_cpu(func, func(*args, **named))
        written = [tensor for tensor, version in zip(given, versions, strict=True) if _version(tensor) != version]
        if written or _tensors(result):
            node = self._recorded(func, args, named)
            node.meta["writes"] = frozenset(self._values.storage(tensor) for tensor in written)
            self._keep(result, node)
        return result

    def end(self, outputs: Sequence[object]) -> None:
        self.graph.output(tuple(self._reference(output) for output in outputs))

    def _recorded(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Node:
        noted = tuple(self._reference(arg) for arg in args)
        named = {key: self._reference(arg) for key, arg in kwargs.items()}
        name = getattr(func, "__name__", "")
        if name == "__get__":  # an attribute that is a tensor, such as ``mT``
            owner = getattr(func, "__self__", None)
            return self.graph.call_function(getattr, (noted[0], getattr(owner, "__name__", "")))
        if getattr(torch.Tensor, name, None) is func:
            return self.graph.call_method(name, noted, named)
        return self.graph.call_function(func, noted, named)

    def _keep(self, result: object, node: Node) -> None:
        if isinstance(result, torch.Tensor):
            self._values.put(result, node)
        elif isinstance(result, list | tuple):
            for place, each in enumerate(result):
                if _tensors(each):
                    part = self.graph.call_function(operator.getitem, (node, place))
                    part.meta["writes"] = frozenset()
                    self._keep(each, part)

    def _reference(self, value: object) -> Any:  # noqa: ANN401  any argument of a call
        """A value as the graph refers to it: a tensor by the node that made it, meta by the CPU."""

        def referred(each: object) -> object:
            if isinstance(each, torch.Tensor):
                return self._node_of(each)
            return CPU if each in (META, "meta") else each

        return map_aggregate(value, referred)

    def _node_of(self, tensor: Tensor) -> Node:
        found = self._values.nodes.get(id(tensor))
        if found is not None:
            return found
        name = self._names.get(id(tensor))
        if name is None:
            raise Unrecordable("it reads a tensor that is neither a weight nor made from the images")
        with self.graph.inserting_after(self._last_input):
            node = self._last_input = self.graph.placeholder(f"weight_{len(self.weights)}")
        self.weights[node.target] = name
        self._values.put(tensor, node)
        return node


def _as_on_the_cpu(func: Callable[..., Any], result: Any) -> Any:  # noqa: ANN401  any answer of a call
    """Put a convolution's answer channels last, as on the CPU: whether a later call copies depends on it."""
    return result.contiguous(memory_format=torch.channels_last) if func is torch.conv2d else result


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else int(tensor._version)  # inference mode counts none


def _tensors(values: object) -> list[Tensor]:
    return [each for each in tree_leaves(values) if isinstance(each, torch.Tensor)]


def _open_counts(graph: Graph, other: Graph) -> None:
    """Replace each number that depends on the number of images by its formula. In place. Raises Unrecordable."""
    opening = _Opening(graph)
    for node, twin in zip(graph.nodes, other.nodes, strict=True):
        if (node.op, node.target) != (twin.op, twin.target):
            raise Unrecordable("it makes other calls for another number of images")
        if node.op not in {"placeholder", "output"}:
            node.args, node.kwargs = opening.merged(node.args, twin.args), opening.merged(node.kwargs, twin.kwargs)


class _Opening:
    """Merges the arguments of a call in the two runs."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._numbers: dict[tuple[int, int], Node] = {}  # by factor and constant

    def merged(self, one: Any, other: Any) -> Any:  # noqa: ANN401  any argument of a call
        (ones, kind), (others, other_kind) = tree_flatten(one), tree_flatten(other)
        if kind != other_kind:
            raise Unrecordable("it makes other calls for another number of images")
        return tree_unflatten([self._merged(*pair) for pair in zip(ones, others, strict=True)], kind)

    def _merged(self, one: object, other: object) -> object:
        if isinstance(one, Node):
            if not isinstance(other, Node) or other.name != one.name:
                raise Unrecordable("it reads other tensors for another number of images")
            return one
        if isinstance(one, slice) and isinstance(other, slice):
            pairs = ((getattr(each, part) for each in (one, other)) for part in ("start", "stop", "step"))
            return slice(*(self._merged(*pair) for pair in pairs))
        return one if one == other else self._number(one, other)

    def _number(self, one: object, other: object) -> Node:
        """A whole number that is a multiple of the number of images, plus a constant."""
        if type(one) is not int or type(other) is not int:
            raise Unrecordable("a value depends on the number of images and is no whole number")
        factor = other - one
        constant = one - factor * COUNTS[0]
        if (factor, constant) not in self._numbers:
            self._numbers[factor, constant] = self._computed(factor, constant)
        return self._numbers[factor, constant]

    def _computed(self, factor: int, constant: int) -> Node:
        """A node after the placeholders and before all recorded calls."""
        images, *weights = (node for node in self._graph.nodes if node.op == "placeholder")
        with self._graph.inserting_after([images, *weights][-1]):
            number = self._graph.call_method("size", (images, 0))
        for function, value, neutral in ((operator.mul, factor, 1), (operator.add, constant, 0)):
            if value != neutral:
                with self._graph.inserting_after(number):
                    number = self._graph.call_function(function, (number, value))
        return number
