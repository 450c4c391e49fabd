"""Reads a pickle as data: it imports nothing that the file names, and runs none of it.

``find_class`` returns an inert class of this module for every name. So the unpickler can only call inert classes and
inert objects:

- GLOBAL, STACK_GLOBAL, INST: their names go to ``find_class``. EXT1, EXT2 and EXT4 ask copyreg's registry first. This
  process registers no code, and the file cannot call copyreg.
- REDUCE, NEWOBJ, NEWOBJ_EX, OBJ, INST: call ``PickledObject.__new__``, or ``__call__`` of an object. Both keep the
  arguments, or make of them what ``REBUILT`` says: a container, bytes, or the description of a tensor.
- BUILD: calls ``__setstate__``; without one BUILD would set attributes. Every class here defines it: an object keeps
  the state, a tensor and a dictionary ignore it, a class and a storage refuse it. Plain values have no attributes.
- APPEND, APPENDS, ADDITEMS, SETITEM, SETITEMS: change a plain container, or an object that keeps what it is given.
- PERSID and BINPERSID: ``persistent_load`` describes a storage.

The reading process limits memory and time, see ``reading_process``. A pickle can announce huge
texts, fill the memo, or nest keys until their hash overflows the stack: that process ends, and the file is refused.
"""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, NoReturn

from experts.checkpoints.tensors import STORAGE_TYPES, TYPES, CheckpointTensor, Storage
from experts.errors import WeightsCorrupt, WeightsRefused

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from io import BytesIO
    from mmap import mmap

SAVE_ADVICE = "save model.state_dict() with torch.save, and bring that"
REASON_SHOWN = 200
RENAMED = {"__builtin__": "builtins", "copy_reg": "copyreg"}  # names of Python 2, which protocol 2 still writes
HARMFUL_MODULES = {
    "os", "posix", "nt", "sys", "subprocess", "socket", "shutil", "pty", "runpy", "importlib", "ctypes", "commands",
    "webbrowser", "popen2", "code", "signal", "multiprocessing", "asyncio", "urllib", "requests", "http",
}  # fmt: skip
HARMFUL_BUILTINS = {"eval", "exec", "execfile", "compile", "open", "file", "input", "__import__", "breakpoint"}


class Unpickler(pickle.Unpickler):
    """Unpickler of the pickle at the file's position; reading leaves the file at the pickle's end."""

    def __init__(self, source: str, file: BytesIO | mmap) -> None:
        super().__init__(file, encoding="utf-8", errors="replace")
        self.storages: dict[str, Storage] = {}
        self._source = source
        self._file = file
        self._names: dict[tuple[str, str], PickledName] = {}

    def load(self) -> object:
        """Value of the pickle. Raises WeightsCorrupt, WeightsRefused for a harmful call, and MemoryError."""
        try:
            return super().load()
        except MemoryError:
            raise
        except _HarmfulCall as error:
            harm = f"its pickle calls {error}, which no weights need (nothing was run)"
            raise WeightsRefused(self._source, f"{harm}: {SAVE_ADVICE}") from error
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:REASON_SHOWN]
            raise WeightsCorrupt(
                self._source, f"its pickle cannot be read, before byte {self._file.tell()}: {reason}"
            ) from error

    def find_class(self, module: str, name: str) -> PickledName:
        key = RENAMED.get(module, module), name
        if key not in self._names:
            self._names[key] = named(*key)
        return self._names[key]

    def persistent_load(self, reference: object) -> object:
        """Storage for a persistent id; in old files also a class with its source."""
        match reference:
            case ("storage", PickledName() as kind, str() | int() as key, _, int() as elements, *_):
                if kind.name not in STORAGE_TYPES:
                    raise ValueError(f"a storage of type {kind.name}, which is not known")
                if isinstance(elements, bool) or elements < 0:
                    raise ValueError("a storage of a negative size")
                found = Storage(str(key), STORAGE_TYPES[kind.name], elements)
                if self.storages.setdefault(found.key, found) != found:
                    raise ValueError(f"storage {found.key} described in two ways")
                return found
            case ("module", kind, *_):
                return kind
        raise ValueError("a reference to something outside that is no storage")


class _HarmfulCall(Exception):
    """Call that saved weights never need. Nothing runs in either case; only the message differs."""


class PickledName(type):
    """Inert stand-in for a class or function that a pickle names."""

    module: str = ""
    name: str = ""

    def __str__(cls) -> str:
        return f"{cls.module}.{cls.name}"

    @property
    def __setstate__(cls) -> NoReturn:
        raise ValueError("a state given to a class")  # an AttributeError would let BUILD set the class's attributes

    @property
    def is_harmful(cls) -> bool:
        if cls.module == "builtins":
            return cls.name in HARMFUL_BUILTINS
        return cls.module.partition(".")[0] in HARMFUL_MODULES


class PickledObject(metaclass=PickledName):
    """Inert object: its class's name, and the arguments, state and items of the pickle.

    ``items`` and ``entries``: appended or set values, for subclasses of list and of dict.
    """

    __slots__ = ("arguments", "entries", "items", "state")

    arguments: tuple[object, ...]
    state: object
    items: list[object]
    entries: dict[object, object]

    def __new__(cls, *arguments: object, **entries: object) -> object:  # type: ignore[misc]  # also a rebuilt value
        rebuild = REBUILT.get((cls.module, cls.name))
        if rebuild is not None:
            return rebuild(arguments)
        if cls.is_harmful:
            raise _HarmfulCall(str(cls))
        made = object.__new__(cls)
        made.arguments, made.state, made.items, made.entries = arguments, None, [], {}
        made.entries.update(entries)
        return made

    def __call__(self, *arguments: object) -> object:
        return type(self)(self, *arguments)

    def __setstate__(self, state: object) -> None:
        self.state = state

    def __setitem__(self, key: object, value: object) -> None:
        self.entries[key] = value

    def append(self, value: object) -> None:
        self.items.append(value)

    def add(self, value: object) -> None:
        self.items.append(value)

    def extend(self, values: Iterable[object]) -> None:
        self.items.extend(values)

    @property
    def kind(self) -> PickledName:
        return type(self)

    def attribute(self, name: str) -> object:
        """Entry of the object's state; None for a state of another shape or without that name."""
        states = self.state if isinstance(self.state, tuple) else (self.state,)  # classes with __slots__ have two
        return next((state[name] for state in states if isinstance(state, dict) and name in state), None)


class PickledDict(dict[object, object]):
    """OrderedDict without the attributes of a state dict."""

    __slots__ = ()

    def __setstate__(self, state: object) -> None:
        pass


def named(module: str, name: str) -> PickledName:
    made = PickledName("PickledObject", (PickledObject,), {"__slots__": ()})
    made.module, made.name = module, name
    return made


def _tensor(arguments: tuple[object, ...], dtype: str | None = None) -> CheckpointTensor:
    """Tensor over a storage. ``dtype``: a name of ITEM_BYTES; default: the storage's."""
    match arguments:
        case (Storage() as storage, int() as offset, tuple() as shape, tuple() as strides, *_):
            sizes = tuple(extent for extent in shape if isinstance(extent, int))
            steps = tuple(stride for stride in strides if isinstance(stride, int))
            if len(sizes) != len(shape) or len(steps) != len(strides):
                raise ValueError("a tensor whose sizes are no numbers")
            tensor = CheckpointTensor(storage, dtype or storage.dtype, offset, sizes, steps)
            if tensor.problem is not None:
                raise ValueError(tensor.problem)
            return tensor
    raise ValueError("a tensor that is not described as torch describes one")


def _tensor_of_type(arguments: tuple[object, ...]) -> CheckpointTensor:
    match arguments:
        case (Storage(), int(), tuple(), tuple(), _, _, PickledName() as dtype, *_):
            if dtype.name not in TYPES:
                raise ValueError(f"a tensor of type {dtype.name}, which is not known")
            return _tensor(arguments, TYPES[dtype.name])
    raise ValueError("a tensor that is not described as torch describes one")


def _parameter(arguments: tuple[object, ...]) -> object:
    return arguments[0]


def _of_subclass(arguments: tuple[object, ...]) -> object:
    match arguments:
        case (PickledName() as rebuild, _, tuple() as inner, *_):
            return rebuild(*inner)
    raise ValueError("a tensor of a class of its own that is not described as torch describes one")


def _reconstructed(arguments: tuple[object, ...]) -> object:
    match arguments:
        case (PickledName() as kind, PickledName(name="object"), *_):
            return kind()
        case (PickledName() as kind, _, value, *_):
            return kind(value)
    raise ValueError("an object of no class")


def _dictionary(arguments: tuple[object, ...]) -> PickledDict:
    """Dictionary from pairs or from another dictionary, without a defaultdict's factory."""
    return PickledDict(next((one for one in arguments if isinstance(one, dict | list | tuple)), ()))


def _elements(arguments: tuple[object, ...]) -> list[object]:
    given = arguments[0] if arguments else ()
    if not isinstance(given, list | tuple | set | frozenset | dict):
        raise ValueError("a container that is made of no container")
    return list(given)


def _bytes(arguments: tuple[object, ...]) -> bytes:
    """``_codecs.encode(text, "latin1")``: how protocol 2 writes bytes; and ``bytes()``."""
    match arguments:
        case ():
            return b""
        case (str() as text, "latin1" | "latin-1"):
            return text.encode("latin-1", "replace")
        case (bytes() as given, *_):
            return given
    raise ValueError("bytes that are not written as Python writes them")


REBUILT: dict[tuple[str, str], Callable[[tuple[object, ...]], object]] = {
    ("torch._utils", "_rebuild_tensor"): _tensor,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _tensor_of_type,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("torch._utils", "_rebuild_parameter_with_state"): _parameter,
    ("torch.nn.parameter", "Parameter"): _parameter,
    ("torch.nn.parameter", "Buffer"): _parameter,
    ("torch._tensor", "_rebuild_from_type"): _of_subclass,
    ("torch._tensor", "_rebuild_from_type_v2"): _of_subclass,
    ("torch", "Size"): lambda arguments: tuple(_elements(arguments)),
    ("collections", "OrderedDict"): _dictionary,
    ("collections", "defaultdict"): _dictionary,
    ("_codecs", "encode"): _bytes,
    ("copyreg", "_reconstructor"): _reconstructed,
    ("builtins", "dict"): _dictionary,
    ("builtins", "list"): _elements,
    ("builtins", "tuple"): lambda arguments: tuple(_elements(arguments)),
    ("builtins", "set"): lambda arguments: set(_elements(arguments)),
    ("builtins", "frozenset"): lambda arguments: frozenset(_elements(arguments)),
    ("builtins", "bytes"): _bytes,
    ("builtins", "bytearray"): _bytes,
}
