"""What may be made of what a pickle calls: tensors, containers, bytes. Every other call becomes a record of itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from experts.checkpoints.inert import STORAGE_TYPES, TYPES, Name, Opaque, Record, Storage, StoredTensor

if TYPE_CHECKING:
    from collections.abc import Callable

RENAMED = {"__builtin__": "builtins", "copy_reg": "copyreg"}  # what Python 2 called them, and protocol 2 still does
HARMFUL_MODULES = {
    "os", "posix", "nt", "sys", "subprocess", "socket", "shutil", "pty", "runpy", "importlib", "ctypes", "commands",
    "webbrowser", "popen2", "code", "signal", "multiprocessing", "asyncio", "urllib", "requests", "http",
}  # fmt: skip
HARMFUL_BUILTINS = {"eval", "exec", "execfile", "compile", "open", "file", "input", "__import__", "breakpoint"}


def named(module: str, name: str) -> Name:
    return Name(RENAMED.get(module, module), name)


def is_harmful(name: Name) -> bool:
    """Whether no saved weights need this call. Nothing is run in any case: only the message depends on it."""
    if name.module == "builtins":
        return name.name in HARMFUL_BUILTINS
    return name.module.partition(".")[0] in HARMFUL_MODULES


def called(name: Name, arguments: tuple[object, ...]) -> object:
    """What a call becomes, or an object made of a class. Raises ValueError, in words, for what no torch writes."""
    rebuild = REBUILT.get((name.module, name.name))
    return Record(name, arguments) if rebuild is None else rebuild(arguments)


def key_of(value: object) -> object:
    """``value`` as a key or a member; Opaque where hashing may go deep."""
    parts = value if isinstance(value, tuple) else (value,)
    plain = (str, bytes, int, float, type(None), Name, Record, Storage, StoredTensor)
    return value if all(isinstance(part, plain) for part in parts) else Opaque(value)


def storage_of(reference: object) -> object:
    """What a persistent reference stands for: a storage, or in old files a class that lies with its source."""
    match reference:
        case ("storage", Name(name=kind), str() | int() as key, _, int() as elements, *_):
            if kind not in STORAGE_TYPES:
                raise ValueError(f"a storage of type {kind}, which is not known")
            if isinstance(elements, bool) or elements < 0:
                raise ValueError("a storage of a negative size")
            return Storage(str(key), STORAGE_TYPES[kind], elements)
        case ("module", kind, *_):
            return kind
    raise ValueError("a reference to something outside that is no storage")


def _tensor(arguments: tuple[object, ...], dtype: str | None = None) -> StoredTensor:
    """``dtype``: a name of ITEM_BYTES; default its storage's."""
    match arguments:
        case (Storage() as storage, int() as offset, tuple() as shape, tuple() as strides, *_):
            sizes = tuple(extent for extent in shape if isinstance(extent, int))
            steps = tuple(stride for stride in strides if isinstance(stride, int))
            if len(sizes) != len(shape) or len(steps) != len(strides):
                raise ValueError("a tensor whose sizes are no numbers")
            tensor = StoredTensor(storage, dtype or storage.dtype, offset, sizes, steps)
            if tensor.problem is not None:
                raise ValueError(tensor.problem)
            return tensor
    raise ValueError("a tensor that is not described as torch describes one")


def _tensor_of_type(arguments: tuple[object, ...]) -> StoredTensor:
    match arguments:
        case (Storage(), int(), tuple(), tuple(), _, _, Name() as dtype, *_):
            if dtype.name not in TYPES:
                raise ValueError(f"a tensor of type {dtype.name}, which is not known")
            return _tensor(arguments, TYPES[dtype.name])
    raise ValueError("a tensor that is not described as torch describes one")


def _parameter(arguments: tuple[object, ...]) -> object:
    if not arguments:
        raise ValueError("a parameter of nothing")
    return arguments[0]


def _of_subclass(arguments: tuple[object, ...]) -> object:
    match arguments:
        case (Name() as rebuild, _, tuple() as inner, *_) if not _calls(rebuild):
            return called(rebuild, inner)
    raise ValueError("a tensor of a class of its own that is not described as torch describes one")


def _calls(name: Name) -> bool:
    """Whether it calls what it is given: such calls could be nested at any depth."""
    return REBUILT.get((name.module, name.name)) in {_of_subclass, _reconstructed}


def _reconstructed(arguments: tuple[object, ...]) -> object:
    match arguments:
        case (Name() as kind, Name(name="object"), *_) if not _calls(kind):
            return called(kind, ())
        case (Name() as kind, _, value, *_) if not _calls(kind):
            return called(kind, (value,))
    raise ValueError("an object of no class")


def _dictionary(arguments: tuple[object, ...]) -> dict[object, object]:
    """Of pairs, as a list or a tuple, or of another dictionary; a defaultdict's factory is left out."""
    given = next((one for one in arguments if isinstance(one, dict | list | tuple)), ())
    if isinstance(given, dict):
        return dict(given)
    pairs = [pair for pair in given if isinstance(pair, list | tuple) and len(pair) == 2]
    if len(pairs) != len(given):
        raise ValueError("a dictionary that is not made of pairs")
    return {key_of(pair[0]): pair[1] for pair in pairs}


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
    ("builtins", "set"): lambda arguments: {key_of(one) for one in _elements(arguments)},
    ("builtins", "frozenset"): lambda arguments: frozenset(key_of(one) for one in _elements(arguments)),
    ("builtins", "bytes"): _bytes,
    ("builtins", "bytearray"): _bytes,
}
