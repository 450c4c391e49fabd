"""torch's compiler left out: ``torch._dynamo`` takes a second and 120 MB to import, and no expert is compiled.

To run an operator on meta, torch imports the compiler and marks the operator as not to be compiled. torchvision imports
it for one predicate. Inside ``compiler_left_out`` stand-ins of both modules serve these two requests.

Guarantees: afterwards the stand-ins and their marks are gone, as if the operators had not run. Anything else that any
thread asks of a stand-in, an attribute or a submodule, removes both and imports the real modules. Once the compiler is
imported, the context does nothing. A torch that asks in another way imports the compiler, as without the context.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager, suppress
from importlib.machinery import ModuleSpec, PathFinder
from threading import RLock
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

COMPILER, UTILS = "torch._dynamo", "torch._dynamo.utils"
MARK = "__dynamo_disable"  # where torch keeps what ``disable`` gave for an operator

_lock = RLock()
_inside: list[None] = []  # an entry for each context
_marked: list[Callable[..., object]] = []


@contextmanager
def compiler_left_out() -> Iterator[None]:
    """Context for operators on meta, and for the import of torchvision. Any number of threads may be in it."""
    with _lock:
        if COMPILER not in sys.modules:
            sys.modules |= {COMPILER: _StandIn(COMPILER), UTILS: _StandIn(UTILS)}
            sys.meta_path.insert(0, _StandIn)
        _inside.append(None)
    try:
        yield
    finally:
        with _lock:
            _inside.pop()
            if not _inside:
                _remove()


class _StandIn(ModuleType):
    """Stand-in of one module. The class itself is the finder of their submodules."""

    __path__ = [f"{path}/_dynamo" for path in torch.__path__]  # noqa: RUF012  as of any package

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  a module's
        if name.startswith("__"):  # asked by the import system
            raise AttributeError(name)
        return getattr(_real(self.__name__), name)

    def disable(self, function: Any, *given: Any, **named: Any) -> Any:  # noqa: ANN401  torch's
        if named != {"wrapping": False}:  # not from an operator
            return _real(COMPILER).disable(function, *given, **named)
        _marked.append(function)
        return function

    def is_compile_supported(self, device: object) -> object:
        return _real(UTILS).is_compile_supported(device)

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if not name.startswith(f"{COMPILER}."):
            return None
        if (found := _real(name)) is None:
            return PathFinder.find_spec(name, path)
        spec = found.__spec__  # which the import replaces
        loader: Any = SimpleNamespace(
            create_module=lambda _: found, exec_module=lambda module: setattr(module, "__spec__", spec)
        )
        return ModuleSpec(name, loader)


def _remove() -> None:
    with _lock:
        for name in (COMPILER, UTILS):
            if isinstance(sys.modules.get(name), _StandIn):
                del sys.modules[name]
        with suppress(ValueError):
            sys.meta_path.remove(_StandIn)
        while _marked:
            with suppress(AttributeError):
                delattr(_marked.pop(), MARK)


def _real(name: str) -> Any:  # noqa: ANN401  torch is not followed by mypy here
    _remove()
    import torch._dynamo.utils  # noqa: F401

    return sys.modules.get(name)
