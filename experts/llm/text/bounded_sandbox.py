"""Jinja's immutable sandbox, which also ends: within a time, and with so much text.

Guarantees: a rendering ends soon after RENDER_S, for every loop's turn, every call, filter and piece of text looks at
the clock; and with at most MOST_CHARACTERS of text. What could grow far beyond that in one step (a product, a power, a
format, a width, a replacement, a list that holds itself many times over) is refused before it is made.
Why: the sandbox of the library keeps a template from the program, but lets it fill the memory or turn for hours.
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

RENDER_S = 2.0  # a template that is well takes milliseconds
MOST_CHARACTERS = 1_000_000  # of a text: a context of two hundred thousand tokens
MOST_REPEATS = 10_000  # a width, an indentation, an exponent's bits: templates pad by a few
DIGITS = re.compile(r"\d+")
LOOPED, JOINED = "_looped", "_joined"  # filters that every loop and every ~ goes through
UNBOUNDED = ("lipsum",)  # which no chat needs
WIDTHS = frozenset({"batch", "center", "expandtabs", "indent", "ljust", "rjust", "round", "slice", "tojson", "truncate",
                    "wordwrap", "zfill"})  # fmt: skip
FORMATS = frozenset({"format", "format_map", "strftime_now"})

_due_s: ContextVar[float | None] = ContextVar("due_s", default=None)


class _Exceeded(TemplateRuntimeError):
    """A template that takes more than it may."""


class BoundedSandbox(ImmutableSandboxedEnvironment):
    """See the module. What it renders, it has compiled."""

    intercepted_binops = frozenset({"*", "**", "%", "+"})

    def __init__(self, render_s: float = RENDER_S, **options: Any) -> None:  # noqa: ANN401 - jinja2's
        super().__init__(finalize=_checked, **options)
        self._render_s = render_s
        for name in UNBOUNDED:
            del self.globals[name]
        self.give(filters=dict(self.filters))
        self.filters[LOOPED] = _looped
        self.filters[JOINED] = _joined

    def give(
        self, *, filters: Mapping[str, Callable[..., Any]], calls: Mapping[str, Callable[..., Any]] | None = None
    ) -> None:
        """More that a template may use."""
        self.filters.update({name: _bounded(name, function) for name, function in filters.items()})
        self.globals.update({name: _bounded(name, function) for name, function in (calls or {}).items()})

    def compiled(self, source: str) -> Template:
        """A template to render. Raises TemplateSyntaxError."""
        tree = _Watched().visit(self.parse(source))
        return Template.from_code(self, self.compile(tree), self.make_globals(None), None)

    def render(self, template: Template, given: Mapping[str, Any]) -> str:
        """Its text. Raises TemplateRuntimeError, and whatever goes wrong in it."""
        token = _due_s.set(time.monotonic() + self._render_s)
        try:
            return "".join(_counted(template.generate(given)))
        finally:
            _due_s.reset(token)

    def call(self, context: Context, obj: Any, *given: Any, **named: Any) -> Any:  # noqa: ANN401 - jinja2's
        """Each call that a template makes."""
        method = getattr(obj, "__wrapped__", obj)  # the sandbox wraps those that format
        _check_call(getattr(method, "__name__", ""), getattr(method, "__self__", None), (*given, *named.values()))
        return super().call(context, obj, *given, **named)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:  # noqa: ANN401 - jinja2's
        """Each operator that can make much of little."""
        _check_operator(operator, left, right)
        return super().call_binop(context, operator, left, right)


class _Watched(NodeTransformer):
    """Every loop and every ~ through a filter of ours."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        """A loop looks at the clock at each turn."""
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, LOOPED, [], [], None, None)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        """Joined texts are counted before they are."""
        self.generic_visit(node)
        return nodes.Filter(nodes.List(node.nodes), JOINED, [], [], None, None)


def _bounded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, which looks at what it is given first."""

    @functools.wraps(function)  # with the marks that the library passes its context or environment by
    def bounded(*given: Any, **named: Any) -> Any:  # noqa: ANN401 - any filter
        has_context = getattr(function, "jinja_pass_arg", None) is not None
        own = given[1:] if has_context else given
        _check_call(name, own[0] if own else None, (*own, *named.values()))
        return function(*given, **named)

    return bounded


def _looped(items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        _look()
        yield item


def _joined(parts: Iterable[Any]) -> str:
    texts = [str(_checked(part)) for part in parts]
    _check_length(sum(map(len, texts)))
    return "".join(texts)


def _counted(pieces: Iterable[str]) -> Iterator[str]:
    characters = 0
    for piece in pieces:
        _look()
        characters += len(piece)
        _check_length(characters)
        yield piece


def _look() -> None:
    due_s = _due_s.get()
    if due_s is not None and time.monotonic() > due_s:
        raise _Exceeded("it takes longer than it may")


def _check_length(characters: int) -> None:
    if characters > MOST_CHARACTERS:
        raise _Exceeded(f"it makes more than {MOST_CHARACTERS} characters")


def _checked(value: Any) -> Any:  # noqa: ANN401 - whatever a template prints
    """The same value, which as a text is not too long."""
    _look()
    _size(value)
    return value


def _size(value: object) -> int:
    """How many characters, numbers and other things it holds, each as often as it is there; counts no further than it
    may be large. Raises TemplateRuntimeError."""
    size, waiting = 0, [value]
    while waiting:
        one = waiting.pop()
        size += len(one) + 1 if isinstance(one, str | bytes | list | tuple | dict | set) else _number_size(one)
        _check_length(size)
        if isinstance(one, dict):
            waiting += one.keys()
            waiting += one.values()
        elif isinstance(one, list | tuple | set):
            waiting += one
        elif isinstance(one, Namespace):
            waiting.append(object.__getattribute__(one, "_Namespace__attrs"))
    return size


def _number_size(one: object) -> int:
    return 1 + one.bit_length() // 3 if isinstance(one, int) else 1


def _check_call(name: str, receiver: object, given: tuple[Any, ...]) -> None:
    _look()
    for one in (receiver, *given):
        _size(one)
    if name in WIDTHS:
        _check_repeats(*(one for one in given if isinstance(one, int)))
    elif name in FORMATS:
        _check_format(receiver if isinstance(receiver, str) else "", *given)
    elif name == "replace":
        _check_replacement(receiver, given if isinstance(receiver, str) else given[1:])
    elif name == "join":
        _check_join(receiver, given)


def _check_repeats(*numbers: int) -> None:
    if any(abs(number) > MOST_REPEATS for number in numbers):
        raise _Exceeded(f"it repeats something more than {MOST_REPEATS} times")


def _check_format(*given: object) -> None:
    """Widths stand in the format, or beside it where that has a star."""
    for one in given:
        if isinstance(one, str):
            _check_repeats(*(int(found[:9]) for found in DIGITS.findall(one)))
        elif isinstance(one, int):
            _check_repeats(one)


def _check_replacement(receiver: object, given: tuple[Any, ...]) -> None:
    texts = [one for one in given if isinstance(one, str) and one is not receiver]
    if isinstance(receiver, str) and len(texts) > 1:
        old, new = texts[:2]
        places = receiver.count(old) if old else len(receiver) + 1
        _check_length(len(receiver) + places * len(new))


def _check_join(receiver: object, given: tuple[Any, ...]) -> None:
    """Between many things a long text may stand many times."""
    glue = max((len(one) for one in (receiver, *given) if isinstance(one, str)), default=0)
    things = max((len(one) for one in (receiver, *given) if isinstance(one, list | tuple)), default=1)
    _check_length(glue * things)


def _check_operator(operator: str, left: Any, right: Any) -> None:  # noqa: ANN401 - a template's values
    _look()
    if operator == "+":
        _check_length(_length(left) + _length(right))
    elif operator == "*":
        times, sized = (left, right) if isinstance(left, int) else (right, left)
        bits = times.bit_length() if isinstance(times, int) else 0
        if isinstance(sized, int):
            _check_repeats(bits + sized.bit_length())
        elif isinstance(times, int):
            _check_length(_length(sized) * max(times, 0))
    elif operator == "**" and isinstance(left, int) and isinstance(right, int):
        _check_repeats(left.bit_length() * right)
    elif operator == "%" and isinstance(left, str):
        _check_format(left, *(right if isinstance(right, tuple) else (right,)))


def _length(value: object) -> int:
    return len(value) if isinstance(value, str | bytes | list | tuple) else 0
