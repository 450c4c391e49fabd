"""Reads a pickle as data, opcode by opcode: no name is looked up, no class built, no function called.

Guarantees, for any bytes: values are dictionaries, lists, tuples, sets, strings, numbers, and the records of
experts.checkpoints.inert alone; no length is believed before the bytes for it are there; no recursion, hash or
comparison goes deeper than one container; opcodes and remembered objects are bounded. So reading ends, in time and
memory bounded by the bytes read, with a value, WeightsCorrupt or WeightsRefused.

Why a machine of our own: a subclass of pickle.Unpickler still calls what ``find_class`` returns, sets state on it, and
allocates by the lengths it reads. Opcodes and their meaning: PEPs 307, 3154 and 574, and Python's pickletools.
"""

from __future__ import annotations

import codecs
import pickle
import struct
from typing import TYPE_CHECKING, NoReturn

from experts.checkpoints.inert import Name, Record, Storage, StoredTensor
from experts.checkpoints.rebuilding import called, is_harmful, key_of, named, storage_of
from experts.errors import WeightsCorrupt, WeightsRefused

if TYPE_CHECKING:
    from collections.abc import Callable
    from mmap import mmap

PROTOCOL_MAXIMUM = 5
OPCODES_MAXIMUM = 10_000_000  # arbitrary: the largest detector's training checkpoint takes some 100 000
MEMO_MAXIMUM = 4_000_000
LINE_BYTES_MAXIMUM = 65_536  # of what the oldest protocol writes as a line of text
NUMBER_BYTES_MAXIMUM = 1024
SAVE_ADVICE = "save model.state_dict() with torch.save, and bring that"


class Unpickler:
    """Reads one pickle that begins at ``position`` of ``data``; afterwards ``position`` is behind it."""

    def __init__(self, source: str, data: bytes | mmap, position: int = 0) -> None:
        self.position = position
        self.storages: dict[str, Storage] = {}
        self._source = source
        self._data = data
        self._end = len(data)
        self._stack: list[object] = []
        self._below: list[list[object]] = []  # what was on the stack before each mark
        self._memo: dict[int, object] = {}

    def load(self) -> object:
        """The value. Raises WeightsCorrupt for what is no pickle, WeightsRefused for what is too large or harmful."""
        for _ in range(OPCODES_MAXIMUM):
            opcode = self._take(1)[0]
            if opcode == pickle.STOP[0]:
                return self._pop()
            step = STEPS.get(opcode)
            if step is None:
                self._corrupt(f"opcode {opcode:#04x}, which is not known or not permitted")
            try:
                step(self)
            except ValueError as error:
                self._corrupt(str(error))
        raise WeightsRefused(self._source, f"its pickle has over {OPCODES_MAXIMUM} opcodes: {SAVE_ADVICE}")

    def _corrupt(self, reason: str) -> NoReturn:
        raise WeightsCorrupt(self._source, f"its pickle has, before byte {self.position}, {reason}")

    # bytes

    def _take(self, count: int) -> bytes:
        if count > self._end - self.position:
            raise WeightsCorrupt(self._source, f"its pickle ends at byte {self._end}, {count} more were announced")
        taken = self._data[self.position : self.position + count]
        self.position += count
        return taken

    def _number(self, width: int, *, signed: bool = False) -> int:
        return int.from_bytes(self._take(width), "little", signed=signed)

    def _line(self) -> bytes:
        limit = min(self.position + LINE_BYTES_MAXIMUM, self._end)
        end = self._data.find(b"\n", self.position, limit)
        if end < 0:
            self._corrupt("a line of text that does not end")
        line = self._take(end - self.position)
        self.position += 1
        return line

    # stack

    def push(self, value: object) -> None:
        self._stack.append(value)

    def _pop(self) -> object:
        if not self._stack:
            self._corrupt("nothing on the stack where something is taken from it")
        return self._stack.pop()

    def _top(self) -> object:
        if not self._stack:
            self._corrupt("nothing on the stack where something is read from it")
        return self._stack[-1]

    def mark(self) -> None:
        self._below.append(self._stack)
        self._stack = []

    def _since_mark(self) -> list[object]:
        if not self._below:
            self._corrupt("no mark where one is needed")
        since, self._stack = self._stack, self._below.pop()
        return since

    def pop(self) -> None:
        if self._stack:
            self._stack.pop()
        else:
            self.pop_mark()

    def pop_mark(self) -> None:
        self._since_mark()

    # memory of what was read

    def remember(self, index: int | None = None) -> None:
        if len(self._memo) >= MEMO_MAXIMUM:
            raise WeightsRefused(self._source, f"its pickle remembers over {MEMO_MAXIMUM} objects: {SAVE_ADVICE}")
        self._memo[len(self._memo) if index is None else index] = self._top()

    def recall(self, index: int) -> None:
        if index not in self._memo:
            self._corrupt(f"a reference to object {index}, which it has not had yet")
        self.push(self._memo[index])

    # numbers and text

    def frame(self) -> None:
        if self._number(8) > self._end - self.position:
            self._corrupt("a frame longer than the file")

    def protocol(self) -> None:
        version = self._number(1)
        if version > PROTOCOL_MAXIMUM:
            self._corrupt(f"protocol {version}, which is not known")

    def long(self, width: int) -> None:
        size = self._number(width)
        if size > NUMBER_BYTES_MAXIMUM:
            self._corrupt(f"a number of {size} bytes")
        self.push(self._number(size, signed=True))

    def text(self, width: int) -> None:
        self.push(self._take(self._number(width)).decode("utf-8", "replace"))

    def raw(self, width: int) -> None:
        self.push(self._take(self._number(width)))

    def float8(self) -> None:
        (number,) = struct.unpack(">d", self._take(8))
        self.push(number)

    def integer_line(self) -> None:
        line = self._line()
        self.push(line == b"01" if line in {b"00", b"01"} else self._parsed(int, line.rstrip(b"L")))

    def float_line(self) -> None:
        self.push(self._parsed(float, self._line()))

    def _parsed(self, kind: Callable[[bytes], object], line: bytes) -> object:
        if len(line) > NUMBER_BYTES_MAXIMUM:
            self._corrupt("a number of too many digits")
        try:
            return kind(line)
        except ValueError:
            self._corrupt("something else where a number stands")

    def string_line(self) -> None:
        line = self._line()
        if len(line) < 2 or line[:1] not in {b"'", b'"'} or line[-1:] != line[:1]:
            self._corrupt("a string without quotes")
        try:
            self.push(codecs.escape_decode(line[1:-1])[0].decode("utf-8", "replace"))
        except ValueError:
            self._corrupt("a string that is not escaped as strings are")

    def unicode_line(self) -> None:
        try:
            self.push(self._line().decode("raw-unicode-escape"))
        except UnicodeError:
            self._corrupt("a string that is not escaped as strings are")

    # containers

    def append(self) -> None:
        value = self._pop()
        self._extend([value])

    def _extend(self, values: list[object]) -> None:
        target = self._top()
        if isinstance(target, Record):
            target.items.extend(values)
        elif isinstance(target, list):
            target.extend(values)
        else:
            self._corrupt(f"something appended to a {type(target).__name__}")

    def set_item(self) -> None:
        value = self._pop()
        self._update([self._pop(), value])

    def _update(self, flat: list[object]) -> None:
        target = self._top()
        entries = target.entries if isinstance(target, Record) else target
        if not isinstance(entries, dict) or len(flat) % 2:
            self._corrupt(f"keys set in a {type(target).__name__}")
        for key, value in zip(flat[::2], flat[1::2], strict=True):
            entries[key_of(key)] = value

    def add_items(self) -> None:
        values = self._since_mark()
        target = self._top()
        if isinstance(target, Record):
            target.items.extend(values)
        elif isinstance(target, set):
            target.update(map(key_of, values))
        else:
            self._corrupt(f"members added to a {type(target).__name__}")

    def dictionary(self) -> None:
        flat = self._since_mark()
        self.push({})
        self._update(flat)

    def tuple_of(self, count: int) -> None:
        values = [self._pop() for _ in range(count)]
        self.push(tuple(reversed(values)))

    # names, and what is made of them

    def global_lines(self) -> None:
        module, name = self._line(), self._line()
        self.push(named(module.decode("utf-8", "replace"), name.decode("utf-8", "replace")))

    def global_of_stack(self) -> None:
        name, module = self._pop(), self._pop()
        if not isinstance(name, str) or not isinstance(module, str):
            self._corrupt("a name that is no text")
        self.push(named(module, name))

    def reduce(self) -> None:
        arguments = self._pop()
        self._make(self._pop(), arguments)

    def new_object_with_keywords(self) -> None:
        keywords, arguments = self._pop(), self._pop()
        self._make(self._pop(), arguments)
        made = self._top()
        if isinstance(made, Record) and isinstance(keywords, dict):
            made.entries.update(keywords)

    def object_of_mark(self) -> None:
        kind, *arguments = self._since_mark() or [None]
        self._make(kind, tuple(arguments))

    def instance(self) -> None:
        arguments = self._since_mark()
        self.global_lines()
        self._make(self._pop(), tuple(arguments))

    def _make(self, kind: object, arguments: object) -> None:
        if not isinstance(arguments, tuple):
            self._corrupt("a call whose arguments are no tuple")
        if isinstance(kind, Name):
            if is_harmful(kind):
                told = f"its pickle calls {kind}, which no weights need (nothing was run)"
                raise WeightsRefused(self._source, f"{told}: {SAVE_ADVICE}")
            self.push(called(kind, arguments))
        elif isinstance(kind, Record):  # what a call returned is called in turn
            self.push(Record(kind.kind, (kind, *arguments)))
        else:
            self._corrupt(f"a call of a {type(kind).__name__}")

    def build(self) -> None:
        state, target = self._pop(), self._top()
        if isinstance(target, Record):
            target.state = state
        elif not isinstance(target, dict | StoredTensor | set | frozenset | bytes | list | tuple):
            self._corrupt(f"a state given to a {type(target).__name__}")

    def reference(self) -> None:
        found = storage_of(self._pop())
        if isinstance(found, Storage):
            known = self.storages.setdefault(found.key, found)
            if known != found:
                self._corrupt(f"storage {found.key} described in two ways")
        self.push(found)


def _pushing(make: Callable[[], object]) -> Callable[[Unpickler], None]:
    return lambda machine: machine.push(make())


def _fixed(width: int, *, signed: bool = False) -> Callable[[Unpickler], None]:
    return lambda machine: machine.push(machine._number(width, signed=signed))


def _memo_line(act: Callable[[Unpickler, int], None]) -> Callable[[Unpickler], None]:
    def step(machine: Unpickler) -> None:
        machine.integer_line()
        index = machine._pop()
        if not isinstance(index, int):
            machine._corrupt("a reference to an object without a number")
        act(machine, index)

    return step


_STEPS: dict[bytes, Callable[[Unpickler], None]] = {
    pickle.PROTO: Unpickler.protocol, pickle.FRAME: Unpickler.frame, pickle.MARK: Unpickler.mark,
    pickle.POP: Unpickler.pop, pickle.POP_MARK: Unpickler.pop_mark,
    pickle.DUP: lambda machine: machine.push(machine._top()),
    pickle.NONE: _pushing(lambda: None), pickle.NEWTRUE: _pushing(lambda: True),
    pickle.NEWFALSE: _pushing(lambda: False), pickle.EMPTY_DICT: _pushing(dict), pickle.EMPTY_LIST: _pushing(list),
    pickle.EMPTY_TUPLE: _pushing(tuple), pickle.EMPTY_SET: _pushing(set),
    pickle.INT: Unpickler.integer_line, pickle.LONG: Unpickler.integer_line, pickle.FLOAT: Unpickler.float_line,
    pickle.STRING: Unpickler.string_line, pickle.UNICODE: Unpickler.unicode_line,
    pickle.BININT: _fixed(4, signed=True), pickle.BININT1: _fixed(1), pickle.BININT2: _fixed(2),
    pickle.BINFLOAT: Unpickler.float8,
    pickle.LONG1: lambda machine: machine.long(1), pickle.LONG4: lambda machine: machine.long(4),
    pickle.SHORT_BINSTRING: lambda machine: machine.text(1), pickle.BINSTRING: lambda machine: machine.text(4),
    pickle.SHORT_BINUNICODE: lambda machine: machine.text(1), pickle.BINUNICODE: lambda machine: machine.text(4),
    pickle.BINUNICODE8: lambda machine: machine.text(8), pickle.SHORT_BINBYTES: lambda machine: machine.raw(1),
    pickle.BINBYTES: lambda machine: machine.raw(4), pickle.BINBYTES8: lambda machine: machine.raw(8),
    pickle.BYTEARRAY8: lambda machine: machine.raw(8),
    pickle.APPEND: Unpickler.append,
    pickle.APPENDS: lambda machine: machine._extend(machine._since_mark()),
    pickle.SETITEM: Unpickler.set_item,
    pickle.SETITEMS: lambda machine: machine._update(machine._since_mark()),
    pickle.ADDITEMS: Unpickler.add_items, pickle.DICT: Unpickler.dictionary,
    pickle.LIST: lambda machine: machine.push(machine._since_mark()),
    pickle.TUPLE: lambda machine: machine.push(tuple(machine._since_mark())),
    pickle.TUPLE1: lambda machine: machine.tuple_of(1), pickle.TUPLE2: lambda machine: machine.tuple_of(2),
    pickle.TUPLE3: lambda machine: machine.tuple_of(3),
    pickle.FROZENSET: lambda machine: machine.push(frozenset(map(key_of, machine._since_mark()))),
    pickle.GLOBAL: Unpickler.global_lines, pickle.STACK_GLOBAL: Unpickler.global_of_stack,
    pickle.REDUCE: Unpickler.reduce, pickle.NEWOBJ: Unpickler.reduce,
    pickle.NEWOBJ_EX: Unpickler.new_object_with_keywords, pickle.OBJ: Unpickler.object_of_mark,
    pickle.INST: Unpickler.instance, pickle.BUILD: Unpickler.build, pickle.BINPERSID: Unpickler.reference,
    pickle.PUT: _memo_line(Unpickler.remember),
    pickle.BINPUT: lambda machine: machine.remember(machine._number(1)),
    pickle.LONG_BINPUT: lambda machine: machine.remember(machine._number(4)),
    pickle.MEMOIZE: Unpickler.remember, pickle.GET: _memo_line(Unpickler.recall),
    pickle.BINGET: lambda machine: machine.recall(machine._number(1)),
    pickle.LONG_BINGET: lambda machine: machine.recall(machine._number(4)),
}  # fmt: skip
STEPS = {code[0]: step for code, step in _STEPS.items()}
