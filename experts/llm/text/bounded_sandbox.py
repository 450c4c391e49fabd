"""Jinja's immutable sandbox with bounds on time, text and memory, which the library's own sandbox lacks.

Guarantees: a rendering ends soon after RENDER_S, as every turn of a loop, call, filter and operator checks the clock.
Its text has at most MOST_CHARACTERS; its calls, filters and operators produce at most MOST_MADE together. A single step
that could exceed that (a product, a power, a width, a format, a replacement, a join) is refused before it runs.
"""

from __future__ import annotations

import functools
import re
import time
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from jinja2 import Template, nodes
from jinja2.exceptions import TemplateRuntimeError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from jinja2.runtime import Context

RENDER_S = 2.0  # a sound template takes milliseconds
MOST_CHARACTERS = 1_000_000  # of a rendered text: a context of two hundred thousand tokens
MOST_MADE = 64 * MOST_CHARACTERS  # a sound template copies each character about ten times
MOST_REPEATS = 10_000  # a width, an indentation, an exponent's bits: templates pad by a few
DIGITS = re.compile(r"\d+")
LOOPED, JOINED = "_looped", "_joined"  # filters that every loop and every ~ goes through
LEFT_OUT = frozenset({"lipsum", "pprint", "urlize", "wordwrap", "xmlattr", "translate"})  # not needed by chats
WIDTHS = frozenset({
    "batch", "center", "expandtabs", "indent", "ljust", "rjust", "round", "slice", "to_bytes", "tojson", "truncate",
    "zfill",
})  # fmt: skip
FORMATS = frozenset({"format", "format_map", "strftime_now"})


class _Exceeded(TemplateRuntimeError):
    """Template exceeded a bound."""


class _RunBudget:
    def __init__(self, render_s: float) -> None:
        self._due_s = time.monotonic() + render_s
        self._made = 0

    def look(self) -> None:
        if time.monotonic() > self._due_s:
            raise _Exceeded("it takes too long")

    def made(self, value: object) -> None:
        self._made += _length(value)
        if self._made > MOST_MADE:
            raise _Exceeded(f"it makes more than {MOST_MADE} characters in its intermediate values")


_budget: ContextVar[_RunBudget | None] = ContextVar("budget", default=None)


class BoundedSandbox(ImmutableSandboxedEnvironment):
    """Sandbox with the module's bounds. Renders only templates that its ``compiled`` returned."""

    intercepted_binops = frozenset({"*", "**", "%", "+"})

    def __init__(self, render_s: float = RENDER_S, **options: Any) -> None:  # noqa: ANN401 - jinja2's
        super().__init__(finalize=_checked, **options)
        self._render_s = render_s
        self.globals = {name: function for name, function in self.globals.items() if name not in LEFT_OUT}
        known = {name: function for name, function in self.filters.items() if name not in LEFT_OUT}
        self.filters = {LOOPED: _looped, JOINED: _joined}
        self.give(filters=known, calls={})

    def give(self, *, filters: Mapping[str, Callable[..., Any]], calls: Mapping[str, Callable[..., Any]]) -> None:
        self.filters.update({name: _bounded(name, function) for name, function in filters.items()})
        self.globals.update({name: _bounded(name, function) for name, function in calls.items()})

    def compiled(self, source: str) -> Template:
        """A template to render. Raises TemplateSyntaxError."""
        tree = _WatchedTemplate().visit(self.parse(source))
        return Template.from_code(self, self.compile(tree), self.make_globals(None), None)

    def render(self, template: Template, given: Mapping[str, Any]) -> str:
        """Render the text. Raises TemplateRuntimeError, and any error of the template."""
        token = _budget.set(_RunBudget(self._render_s))
        try:
            return "".join(_counted(template.generate(given)))
        finally:
            _budget.reset(token)

    def call(self, context: Context, obj: Any, *given: Any, **named: Any) -> Any:  # noqa: ANN401 - jinja2's
        """Check a call of the template, then make it."""
        method = getattr(obj, "__wrapped__", obj)  # the sandbox wraps methods that format
        name = getattr(method, "__name__", "")
        settled = _settled(given) if name == "join" else given
        _check_call(name, getattr(method, "__self__", None), (*settled, *named.values()))
        return _made(super().call(context, obj, *settled, **named))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:  # noqa: ANN401 - jinja2's
        _check_operator(operator, left, right)
        return _made(super().call_binop(context, operator, left, right))


class _WatchedTemplate(NodeTransformer):
    """Sends every loop and every ~ through a bounded filter."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, LOOPED, [], [], None, None)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return nodes.Filter(nodes.List(node.nodes), JOINED, [], [], None, None)


def _bounded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function: its arguments are measured before the call."""
    passed = 0 if getattr(function, "jinja_pass_arg", None) is None else 1  # the library's context or environment

    @functools.wraps(function)  # keeps that mark
    def bounded(*given: Any, **named: Any) -> Any:  # noqa: ANN401 - any filter
        own = _settled(given[passed:]) if name == "join" else given[passed:]
        _check_call(name, own[0] if own else None, (*own[1:], *named.values()))
        return _made(function(*given[:passed], *own, **named))

    return bounded


def _settled(given: tuple[Any, ...]) -> tuple[Any, ...]:
    """Turn lazy iterables into lists."""
    return tuple(list(_looped(one)) if hasattr(one, "__next__") else one for one in given)


def _looped(items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        _look()
        yield item


def _joined(parts: Iterable[Any]) -> str:
    texts = [str(_checked(part)) for part in parts]
    _check_length(sum(map(len, texts)))
    return str(_made("".join(texts)))


def _counted(pieces: Iterable[str]) -> Iterator[str]:
    characters = 0
    for piece in pieces:
        _look()
        characters += len(piece)
        _check_length(characters)
        yield piece


def _look() -> None:
    budget = _budget.get()
    if budget is not None:
        budget.look()


def _made(value: Any) -> Any:  # noqa: ANN401 - any value of a template
    """Return the value after counting it."""
    budget = _budget.get()
    if budget is not None:
        budget.made(value)
    return value


def _check_length(characters: int) -> None:
    if characters > MOST_CHARACTERS:
        raise _Exceeded(f"it makes more than {MOST_CHARACTERS} characters")


def _checked(value: Any) -> Any:  # noqa: ANN401 - any value of a template
    _look()
    _size(value)
    return value


def _size(value: object) -> int:
    """Count of characters, digits and items in a value, repeats included. Raises TemplateRuntimeError."""
    size, waiting = 0, [value]
    while waiting:
        one = waiting.pop()
        size += 1 + (one.bit_length() // 3 if isinstance(one, int) else _length(one))
        _check_length(size)
        if isinstance(one, dict):
            waiting += one.keys()
            waiting += one.values()
        elif isinstance(one, list | tuple | set):
            waiting += one
        elif isinstance(one, Namespace):
            waiting.append(object.__getattribute__(one, "_Namespace__attrs"))
    return size


def _length(value: object) -> int:
    return len(value) if isinstance(value, str | bytes | list | tuple | dict | set) else 0


def _check_call(name: str, receiver: object, given: tuple[Any, ...]) -> None:
    """``receiver``: the object of the method, or the filtered value."""
    _look()
    if name in LEFT_OUT:
        raise _Exceeded(f"{name} cannot be bounded, and is left out")
    sizes = [_size(one) for one in (receiver, *given)]
    if name in WIDTHS:
        _check_widths(receiver, given, sizes[0])
    elif name in FORMATS:
        _check_format(receiver, given, max(sizes))
    elif name == "replace":
        _check_replacement(receiver, given)
    elif name == "join":  # the separator, once per item
        _check_length(_length(receiver) * max((_length(one) for one in given), default=0))


def _check_repeats(*numbers: int) -> None:
    if any(abs(number) > MOST_REPEATS for number in numbers):
        raise _Exceeded(f"it repeats something more than {MOST_REPEATS} times")


def _check_widths(receiver: object, given: tuple[Any, ...], size: int) -> None:
    """A width may apply to a whole text, to each of its lines, or to each item."""
    widths = [one if isinstance(one, int) else _length(one) for one in given]
    _check_repeats(*widths)
    is_text = isinstance(receiver, str)
    places = 1 + receiver.count("\n") + receiver.count("\t") if isinstance(receiver, str) else size
    _check_length(max(widths, default=0) * places if is_text or isinstance(receiver, dict | list | tuple) else 0)


def _check_format(receiver: object, given: tuple[Any, ...], largest: int) -> None:
    """Widths are in the format, or arguments of its stars; and a format may repeat its arguments."""
    form = receiver if isinstance(receiver, str) else next((one for one in given if isinstance(one, str)), "")
    _check_repeats(*(int(found[:9]) for found in DIGITS.findall(form)))
    _check_repeats(*(one for one in _flat(given) if isinstance(one, int)))
    if (form.count("%") + form.count("{")) * largest > MOST_MADE:
        raise _Exceeded(f"it makes more than {MOST_MADE} characters in its intermediate values")


def _flat(given: Iterable[Any]) -> Iterator[Any]:
    for one in given:
        if isinstance(one, tuple | list):
            yield from one
        elif isinstance(one, dict):
            yield from one.values()
        else:
            yield one


def _check_replacement(receiver: object, given: tuple[Any, ...]) -> None:
    texts = [one for one in given if isinstance(one, str)]
    if isinstance(receiver, str) and len(texts) > 1:
        old, new = texts[:2]
        places = receiver.count(old) if old else len(receiver) + 1
        _check_length(len(receiver) + places * len(new))


def _check_operator(operator: str, left: Any, right: Any) -> None:  # noqa: ANN401 - a template's values
    _look()
    if operator == "+":
        _check_length(_length(left) + _length(right))
    elif operator == "*":
        _check_product(left, right)
    elif operator == "**" and isinstance(left, int) and isinstance(right, int):
        _check_repeats(left.bit_length() * right)
    elif operator == "%" and isinstance(left, str):
        _check_format(left, (right,), _size(right))


def _check_product(left: Any, right: Any) -> None:  # noqa: ANN401 - a template's values
    if isinstance(left, int) and isinstance(right, int):
        _check_repeats(left.bit_length() + right.bit_length())
        return
    for times, repeated in ((left, right), (right, left)):
        if isinstance(times, int):
            _check_length(_length(repeated) * max(times, 0))
