"""Edits to a line file as text: set a key, add or remove an entry; the rest stays as it was, to the byte.

New text is inserted at the parser's marks: libraries that load and dump a file change long lines and comments.
Guarantees: the result means the old text and the change; else ConfigError says where the edit failed, for example
behind an alias.
"""

from __future__ import annotations

import json
import os
import re
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agent.line_file.spans import YamlSpan, spans_of
from experts.document import DECIMAL, INTEGER, WORDS, parse_document, read_document
from experts.errors import ConfigError
from experts.filesystem import whole_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from experts.document import KeyPath

Plain = str | int | float | bool | None | list[Any] | tuple[Any, ...] | dict[str, Any]

PLAIN_WORD = re.compile(r"[A-Za-z0-9_./][A-Za-z0-9_./+ -]*(?<! )")  # needs no quotes, unless it is also another type
ESCAPED = re.compile(r"[\x00-\x1f\x7f-\xa0\u2028\u2029\ufeff]")  # not possible in single quotes
UNNAMED = re.compile(r"[^\w.-]+")  # not allowed in the name of a line
ROW_LENGTH = 80  # longer values get a line per entry
LINE_LENGTH = 120
STEP = "  "
BOM = "\ufeff"


def set_key(text: str, path: KeyPath, value: Plain, comment: str = "", *, file: Path) -> str:
    """The text with ``value`` at ``path``, replaced or as the last key of its mapping. Missing mappings are added.
    ``comment`` goes above a new key, or into a new entry above its keys; an existing key keeps its comment. ``file``:
    for messages. Raises ConfigError."""
    edit = _Edit.of(text, file)
    known = edit.known(path)
    if known == len(path):
        changed = edit.replaced(path, value)
    else:
        whole: Plain = value
        for part in reversed(path[known + 1 :]):
            whole = {str(part): whole}
        changed = edit.with_key(path[: known + 1], whole, comment)
    return edit.proved(changed, path, lambda values: _set(values, path, value))


def add_expert(text: str, expert: str, entry: Mapping[str, Plain], comment: str = "", *, file: Path) -> str:
    """The text with a new expert, last of its section. Raises ConfigError if the expert exists."""
    edit, path = _Edit.of(text, file), ("experts", expert)
    if edit.known(path) == len(path):
        raise edit.error("exists already - choose another name, or remove it first", path)
    return set_key(text, path, dict(entry), comment, file=file)


def remove(text: str, path: KeyPath, *, file: Path) -> str:
    """The text without a key or an item, and without its comments. Raises ConfigError if it is missing."""
    edit = _Edit.of(text, file)
    if edit.known(path) < len(path):
        raise edit.error("is missing, so it cannot be removed", path)
    return edit.proved(edit.without(path), path, lambda values: _at(values, path[:-1]).pop(path[-1]))


def append(text: str, path: KeyPath, value: Plain, *, file: Path) -> str:
    """The text with one more item at the end of the list at ``path``, which may be missing."""
    edit = _Edit.of(text, file)
    there = edit.pair(path)[1] if edit.known(path) == len(path) else None
    if there is None or there.is_empty or there.items == ():
        return set_key(text, path, [value], file=file)
    if there.items is None:
        raise edit.error("is not a list, so nothing can be added - write it as a list", path)
    return edit.proved(edit.with_item(there, value), path, lambda values: _at(values, path).append(_copied(value)))


def content_of(file: Path) -> bytes:
    """Content of a line file; of a missing one, its first lines. Raises ConfigError."""
    if file.exists() or not file.absolute().parent.is_dir():
        return read_document(file).content
    name = UNNAMED.sub("-", file.absolute().parent.name).strip("-.") or "line"
    return f"line: {rendered(name)}\nstate: ./state\n".encode()


@contextmanager
def created(file: Path, content: bytes) -> Iterator[None]:
    """A missing file is created with this content, and removed if its edit fails."""
    if file.exists():
        yield
        return
    with whole_file(file) as final:
        final.write(content)
    try:
        yield
    except BaseException:
        file.unlink(missing_ok=True)
        raise


def edit_file(file: Path, edit: Callable[[str], str]) -> None:
    """Edit a file in place, whole or not at all; its permissions stay. Raises ConfigError, and OSError."""
    real = file.resolve()  # a link stays one
    content = real.read_bytes()
    parse_document(file, content)
    changed = edit(content.decode("utf-8"))
    mode = real.stat().st_mode
    with whole_file(real, has_rivals=True) as final:
        final.write(changed.encode("utf-8"))
        os.fchmod(final.fileno(), mode & 0o7777)


def rendered(value: Plain) -> str:
    """A value on one line, in a form that the reader of line files reads back."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{rendered(key)}: {rendered(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(rendered(each) for each in value) + "]"
    if isinstance(value, str):
        return _quoted(value)
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return repr(value)


def _quoted(text: str) -> str:
    reads_otherwise = text in WORDS or INTEGER.fullmatch(text) or DECIMAL.fullmatch(text)
    if PLAIN_WORD.fullmatch(text) and not reads_otherwise:
        return text
    if not ESCAPED.search(text):
        return "'" + text.replace("'", "''") + "'"
    escaped = ESCAPED.sub(lambda found: f"\\u{ord(found[0]):04x}", text.replace("\\", "\\\\"))
    return '"' + escaped.replace('"', '\\"') + '"'


def _block(key: str, value: Plain, column: int, comment: str = "") -> list[str]:
    """The lines of a key and its value, indented by ``column``: entries one per line, small values in a row."""
    indent = " " * column
    words = [f"{indent}# {line}".rstrip() for line in comment.splitlines()]
    if isinstance(value, dict) and (len(rendered(value)) > ROW_LENGTH or any(map(_has_rows, value.values()))):
        if len(value) == 1 and isinstance(each := next(iter(value.values())), dict):  # a section made for its entry
            return [f"{indent}{_quoted(key)}:", *_block(next(iter(value)), each, column + len(STEP), comment)]
        inside = [line for name, each in value.items() for line in _block(name, each, column + len(STEP))]
        return [f"{indent}{_quoted(key)}:", *(f"{STEP}{line}" for line in words), *inside]
    if isinstance(value, list | tuple) and _has_rows(value):
        return [*words, f"{indent}{_quoted(key)}:", *(f"{indent}{STEP}- {rendered(each)}" for each in value)]
    return [*words, f"{indent}{_quoted(key)}: {rendered(value)}"]


def _has_rows(value: Plain) -> bool:
    return isinstance(value, dict) or (isinstance(value, list | tuple) and any(map(_has_rows, value)))


@dataclass(frozen=True, slots=True)
class _Edit:
    file: Path
    text: str  # without byte order mark
    root: YamlSpan | None
    bom: str
    line_end: str

    @classmethod
    def of(cls, text: str, file: Path) -> _Edit:
        parse_document(file, text.encode())  # for its syntax errors
        bare = text.removeprefix(BOM)
        line_end = "\r\n" if "\r\n" in bare else "\n"
        return cls(file, bare, spans_of(bare), BOM if bare is not text else "", line_end)

    def error(self, message: str, path: KeyPath) -> ConfigError:
        return parse_document(self.file, self.text.encode()).error(message, *path)

    def known(self, path: KeyPath) -> int:
        """Number of parts of a path that exist. Raises ConfigError if it goes through an alias or a plain value."""
        length = 0
        for length in range(len(path) + 1):
            span = self.pair(path[:length])[1] if length else self.root
            if span is None or span.is_empty:
                return length
            if span.alias is not None and length < len(path):
                raise self.error(f"is behind the alias *{span.alias} - write it out here first", path[:length])
            if length < len(path) and span.child(path[length]) is None:
                if span.pairs is None:
                    raise self.error(f"has no place for {path[length]!r} - write a mapping", path[:length])
                return length
        return length

    def pair(self, path: KeyPath) -> tuple[YamlSpan, YamlSpan]:
        span, pair = self.root, None
        for part in path:
            pair = None if span is None else span.child(part)
            span = None if pair is None else pair[1]
        if pair is None:
            raise self.error("is missing", path)
        return pair

    def replaced(self, path: KeyPath, value: Plain) -> str:
        """The text with another value at an existing path; a key with lines below it keeps its comment."""
        key, there = self.pair(path)
        if there.is_empty:
            return self._spliced(there.start, there.start, f" {rendered(value)}")
        if there.flow or there.text is not None:
            return self._spliced(there.start, there.end, rendered(value))
        if key is there or self.text[self._line_start(there.start) : there.start].strip():
            return self._spliced(there.start, self._row_end(there.end), rendered(value))
        colon = self.text.index(":", key.end) + 1
        beside = self.text[colon : self._row_end(colon)]
        return self._spliced(colon, self._row_end(there.end), f" {rendered(value)}{beside}")

    def with_key(self, path: KeyPath, value: Plain, comment: str) -> str:
        parent = self.pair(path[:-1])[1] if len(path) > 1 else self.root
        key = str(path[-1])
        if parent is None:
            lines = _block(key, value, 0, comment)
            return self._with_lines(len(self.text), lines)
        if parent.is_empty:
            column = self._column(self.pair(path[:-1])[0].start) + len(STEP)
            return self._with_lines(self._below(parent.end, column), _block(key, value, column, comment))
        if not parent.flow and parent.pairs:
            column = self._column(parent.pairs[0][0].start)
            return self._with_lines(self._below(parent.end, column), _block(key, value, column, comment))
        return self._in_braces(path, parent, value, comment)

    def _in_braces(self, path: KeyPath, parent: YamlSpan, value: Plain, comment: str) -> str:
        row = f"{_quoted(str(path[-1]))}: {rendered(value)}"
        if not parent.pairs:
            changed = self._spliced(parent.start, parent.end, f"{{{row}}}")
        else:
            end = max(parent.pairs[-1][1].end, parent.pairs[-1][0].end)
            changed = self._spliced(end, end, f",{self._gap(end, row)}{row}")
        if not comment:
            return changed
        start = self._line_start(self._outermost_row(path).start)
        line = self.text[start : self._next_line(start)]
        indent = line[: len(line) - len(line.lstrip(" "))]
        words = "".join(f"{indent}# {each}".rstrip() + self.line_end for each in comment.splitlines())
        at = start + len(self.bom)
        return changed[:at] + words + changed[at:]

    def _gap(self, at: int, row: str) -> str:
        """A space, or a line end if the line would be too long."""
        start = self._line_start(at)
        line = self.text[start : self._row_end(at)]
        if len(line) + len(row) + 2 <= LINE_LENGTH:
            return " "
        return self.line_end + " " * (len(line) - len(line.lstrip(" -")) + len(STEP))

    def with_item(self, there: YamlSpan, value: Plain) -> str:
        last = (there.items or ())[-1]
        if there.flow:
            row = rendered(value)
            return self._spliced(last.end, last.end, f",{self._gap(last.end, row)}{row}")
        column = self._column(there.start)
        return self._with_lines(self._below(there.end, column), [f"{' ' * column}- {rendered(value)}"])

    def without(self, path: KeyPath) -> str:
        parent = self.pair(path[:-1])[1] if len(path) > 1 else self.root
        key, there = self.pair(path)
        inside = [] if parent is None else list(parent.pairs or [(item, item) for item in parent.items or ()])
        index = inside.index((key, there))
        if parent is not None and len(inside) == 1:
            empty = "{}" if parent.pairs is not None else "[]"
            if len(path) == 1 or parent.flow:
                return self._spliced(parent.start, parent.end, empty)
            return self.replaced(path[:-1], {} if parent.pairs is not None else [])
        if parent is not None and parent.flow:
            if index:
                return self._spliced(inside[index - 1][1].end, max(there.end, key.end), "")
            return self._spliced(key.start, inside[1][0].start, "")
        first = self.text.rfind("-", 0, key.start) if parent is not None and parent.items is not None else key.start
        column = self._column(first)
        start = self._line_start(first)
        if self.text[start:first].strip():  # the first key behind a dash: the next one takes its place
            return self._spliced(first, inside[index + 1][0].start, "")
        return self._spliced(start, self._below(there.end, column + 1), "")

    def proved(self, changed: str, path: KeyPath, change: Callable[[dict[str, Any]], object]) -> str:
        """``changed``, if it means the old text and the change; else ConfigError."""
        wanted = _copied(parse_document(self.file, self.text.encode()).values)
        change(wanted)
        try:
            means = parse_document(self.file, changed.encode()).values
        except ConfigError as error:
            raise self.error(f"cannot be edited as it is written ({error.message}) - edit it by hand", path) from error
        if means != wanted:
            raise self.error("cannot be edited without changing other values - edit it by hand", path)
        return changed

    def _spliced(self, start: int, end: int, new: str) -> str:
        return self.bom + self.text[:start] + new + self.text[end:]

    def _with_lines(self, at: int, lines: list[str]) -> str:
        before = self.line_end if at and not self.text[:at].endswith("\n") else ""
        return self._spliced(at, at, before + "".join(line + self.line_end for line in lines))

    def _line_start(self, at: int) -> int:
        return self.text.rfind("\n", 0, at) + 1

    def _column(self, at: int) -> int:
        return at - self._line_start(at)

    def _below(self, end: int, column: int) -> int:
        """Start of the line after a value and its comments, which are indented as far or further."""
        at = self._next_line(end)
        while at < len(self.text):
            following = self._next_line(at)
            line = self.text[at:following]
            if not line.lstrip(" ").startswith("#") or len(line) - len(line.lstrip(" ")) < column:
                break
            at = following
        return at

    def _row_end(self, at: int) -> int:
        following = self._next_line(at)
        return at + len(self.text[at:following].rstrip("\r\n"))

    def _next_line(self, at: int) -> int:
        found = self.text.find("\n", at)
        return len(self.text) if found < 0 else found + 1

    def _outermost_row(self, path: KeyPath) -> YamlSpan:
        spans = [self.pair(path[:length])[1] for length in range(1, len(path))]
        return next((span for span in spans if span.flow), spans[-1] if spans else self.root or YamlSpan(0, 0))


def _at(values: Any, path: KeyPath) -> Any:  # noqa: ANN401  # plain YAML values
    for part in path:
        values = values[part]
    return values


def _set(values: Any, path: KeyPath, value: Plain) -> None:  # noqa: ANN401  # plain YAML values
    for part in path[:-1]:
        if isinstance(values, dict) and values.get(part) is None:
            values[part] = {}
        values = values[part]
    values[path[-1]] = _copied(value)


def _copied(value: Plain) -> Any:  # noqa: ANN401  # plain YAML values
    """A copy in which aliases are separate values."""
    return json.loads(json.dumps(value))
