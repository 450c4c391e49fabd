"""A YAML file in which every key knows its line.

Guarantees: a key is text as written (`0402:` stays "0402"), booleans are only `true` and `false` (`NO`, `on`, `off`
stay text), numbers are plain decimals (no octal, no base 60, no dates), a key written twice is an error. Errors name
file, line and column of a value, or its environment variable. Anchors, aliases and `<<` merges work as in YAML 1.1;
explicit tags do not exist.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from experts.errors import ConfigError, FilePlace

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping
    from pathlib import Path

    from pydantic.fields import FieldInfo
    from pydantic_core import ErrorDetails

INTEGER = re.compile(r"[-+]?(?:0|[1-9][0-9]{0,99})")
DECIMAL = re.compile(r"[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?")
WORDS: dict[str, bool | None] = {"": None, "~": None, "null": None, "true": True, "false": False}
PLAIN_TAGS = frozenset(f"tag:yaml.org,2002:{kind}" for kind in ("str", "map", "seq"))
MERGE_KEY = "<<"
MOST_BYTES, MOST_VALUES, DEEPEST = 16 * 2**20, 2**20, 100  # values: a few aliases of aliases make billions

KeyPath: TypeAlias = tuple[str | int, ...]
Model = TypeVar("Model", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class DocumentEntry:
    """Value of a document with the place of its key (from 1), and the entries below it. ``size``: values in all."""

    value: Any
    line: int
    column: int
    children: Mapping[str | int, DocumentEntry] = field(default_factory=dict)
    size: int = 1

    def at(self, node: yaml.Node) -> DocumentEntry:
        return replace(self, line=node.start_mark.line + 1, column=node.start_mark.column + 1)


@dataclass(frozen=True)
class Document:
    """File as read, with the values that environment variables override."""

    file: Path
    content: bytes
    root: DocumentEntry
    overrides: Mapping[KeyPath, str] = field(default_factory=dict)  # path -> name of the environment variable
    override_values: Mapping[KeyPath, Any] = field(default_factory=dict)

    @cached_property
    def sha256(self) -> str:
        """Digest of the content, and of the values in the place of its own."""
        digest = hashlib.sha256(self.content)
        if self.override_values:
            values = [(key_text(path), value) for path, value in self.override_values.items()]
            digest.update(json.dumps(values, sort_keys=True).encode())
        return digest.hexdigest()

    @cached_property
    def values(self) -> dict[str, Any]:
        """Document as plain mappings, lists and scalars, with overrides applied."""
        values: Any = self.root.value
        for path, value in self.override_values.items():
            values = _with_value(values, path, value)
        return dict(values)

    def override(self, path: KeyPath, text: str, variable: str) -> Document:
        """The document with the value ``text`` (YAML) at ``path``; errors about it name the variable."""
        try:
            value = _build(yaml.compose(text, Loader=_LOADER), {}, ()).value
        except (yaml.YAMLError, _YamlRefused) as error:
            raise ConfigError(f"environment variable {variable}: {_yaml_reason(error)} - quote the value") from error
        return self.having(path, value, variable)

    def having(self, path: KeyPath, value: object, origin: str) -> Document:
        """The document with this value at ``path``; errors about it name ``origin``."""
        return replace(
            self, overrides={**self.overrides, path: origin}, override_values={**self.override_values, path: value}
        )

    def place(self, *path: str | int) -> FilePlace:
        """Place of the key at ``path``, else of the nearest key above it."""
        entry, _ = self._nearest(path)
        return FilePlace(self.file, entry.line, entry.column, key_text(path))

    def origin(self, path: KeyPath) -> str | None:
        """Origin of the value at ``path``: FILE:LINE or a variable; None for a default."""
        variable = self._variable_of(path)
        if variable is not None:
            return variable
        entry, is_there = self._nearest(path)
        return f"{self.file.name}:{entry.line}" if is_there else None

    def error(self, message: str, *path: str | int) -> ConfigError:
        """A ConfigError about the value at ``path``, naming the file's place, or the variable that set it."""
        variable = self._variable_of(path)
        if variable is not None:
            return ConfigError(f"environment variable {variable}: {key_text(path)}: {message}")
        return ConfigError(message, self.place(*path))

    def _variable_of(self, path: KeyPath) -> str | None:
        """Variable that set the value at ``path``, or a value below it that the file lacks."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.overrides:
                return self.overrides[path[:length]]
        if path and not self._nearest(path)[1]:
            return next((name for set_path, name in self.overrides.items() if set_path[: len(path)] == path), None)
        return None

    def _nearest(self, path: KeyPath) -> tuple[DocumentEntry, bool]:
        """The entry at ``path``, or the nearest above it; and whether it is the one at ``path``."""
        entry = self.root
        for part in path:
            if part not in entry.children:
                return entry, False
            entry = entry.children[part]
        return entry, True

    def validate(self, model: type[Model]) -> Model:
        """The values as this model, which is given ``{"folder": the file's folder}`` as context.

        Raises ConfigError with every problem that the model finds.
        """
        try:
            return model.model_validate(self.values, context={"folder": self.file.parent})
        except ValidationError as error:
            problems = [self._problem(details, model) for details in error.errors()]
            raise ConfigError.of(problems) from error

    def _problem(self, details: ErrorDetails, model: type[BaseModel]) -> ConfigError:
        path = tuple(part for part in details["loc"] if part != "[key]")
        if details["type"] == "extra_forbidden":
            return self.error(f"unknown key - {suggestion(str(path[-1]), _keys_below(model, path[:-1]))}", *path)
        _, field_info = _annotation_at(model, path)
        meaning = f" - {field_info.description}" if field_info and field_info.description else ""
        if details["type"] == "missing":
            return self.error(f"is missing{meaning or ' - add it'}", *path)
        if details["type"] == "value_error":
            return self.error(details["msg"].removeprefix("Value error, "), *path)
        return self.error(f"{details['msg']}, not {details['input']!r}{meaning}", *path)


def read_document(file: Path) -> Document:
    """Read one YAML file whose root is a mapping. Raises ConfigError for what cannot be read or parsed."""
    try:
        with file.open("rb") as opened:
            content = opened.read(MOST_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read ({error.strerror}) - check the path and its permissions") from error
    if len(content) > MOST_BYTES:
        raise ConfigError(f"{file}: has more than {MOST_BYTES} bytes - is it the right file?")
    return parse_document(file, content)


def parse_document(file: Path, content: bytes) -> Document:
    """Parse bytes already read, as ``read_document`` does; ``file``: the name in errors."""
    text = _decode(file, content)
    try:
        node = yaml.compose(text, Loader=_LOADER)
        root = DocumentEntry({}, 1, 1) if node is None else _build(node, {}, ())
    except _YamlRefused as error:
        mark = error.node.start_mark
        place = FilePlace(file, mark.line + 1, mark.column + 1, key_text(error.path) or "document")
        raise ConfigError(str(error), place) from error
    except yaml.MarkedYAMLError as error:
        found = error.problem_mark or error.context_mark
        line, column = (found.line + 1, found.column + 1) if found else (1, 1)
        raise ConfigError(
            f"{_yaml_reason(error)} - correct the syntax", FilePlace(file, line, column, "syntax")
        ) from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{_yaml_reason(error)} - correct the syntax", FilePlace(file, 1, 1, "syntax")) from error
    if not isinstance(root.value, dict):
        raise ConfigError("must be `key: value` lines - start with `line: NAME`", FilePlace(file, 1, 1, "document"))
    return Document(file, content, root)


def key_text(path: Iterable[str | int]) -> str:
    """A key's path as errors show it: `experts.cls/r.labels[0]`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def suggestion(word: str, known: Collection[str], otherwise: str = "") -> str:
    """`did you mean X?` when a known word is close; else ``otherwise``, or the known words."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    if close:
        return f"did you mean {close[0]!r}?"
    return otherwise or f"known here: {', '.join(sorted(known)) or 'nothing'}"


class _YamlRefused(Exception):
    """YAML that parses but is not allowed in a configuration."""

    def __init__(self, message: str, node: yaml.Node, path: KeyPath) -> None:
        super().__init__(message)
        self.node = node
        self.path = path


_LOADER: Any = getattr(yaml, "CBaseLoader", yaml.BaseLoader)  # "Base": tags stay as written, scalars stay text


def _decode(file: Path, content: bytes) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = content[: error.start]
        place = FilePlace(file, before.count(b"\n") + 1, error.start - before.rfind(b"\n"), "encoding")
        wrong = f"byte 0x{content[error.start]:02x} is not UTF-8"
        raise ConfigError(f"{wrong} - save the file in the encoding UTF-8", place) from error


def _yaml_reason(error: Exception) -> str:
    if isinstance(error, yaml.MarkedYAMLError):
        return ", ".join(part for part in (error.context, error.problem) if part)
    return str(error).splitlines()[0]


def _build(
    node: yaml.Node | None, built: dict[int, DocumentEntry], path: KeyPath, open_nodes: tuple[int, ...] = ()
) -> DocumentEntry:
    """Entry of one node. ``built`` shares aliased nodes; ``open_nodes``: ancestors of this node."""
    if node is None:
        return DocumentEntry(None, 1, 1)
    if id(node) in built:
        return built[id(node)].at(node)
    if id(node) in open_nodes:
        raise _YamlRefused("an alias stands inside the value it names - write it out", node, path)
    if node.tag not in PLAIN_TAGS:
        raise _YamlRefused(f"the tag {node.tag} is not supported - write the plain value", node, path)
    if len(open_nodes) > DEEPEST:
        raise _YamlRefused(f"is more than {DEEPEST} levels deep - write it flatter", node, path)
    inside = (*open_nodes, id(node))
    if isinstance(node, yaml.MappingNode):
        children = _mapping(node, built, path, inside)
        entry = DocumentEntry({key: child.value for key, child in children.items()}, 1, 1, children)
    elif isinstance(node, yaml.SequenceNode):
        items = [_build(item, built, (*path, index), inside) for index, item in enumerate(node.value)]
        entry = DocumentEntry([item.value for item in items], 1, 1, dict(enumerate(items)))
    else:
        quoted = isinstance(node, yaml.ScalarNode) and bool(node.style)
        entry = DocumentEntry(node.value if quoted else _plain(node.value), 1, 1)
    size = 1 + sum(child.size for child in entry.children.values())
    if size > MOST_VALUES:
        raise _YamlRefused(f"has more than {MOST_VALUES} values by its aliases - write fewer", node, path)
    built[id(node)] = replace(entry.at(node), size=size)
    return built[id(node)]


def _mapping(
    node: yaml.MappingNode, built: dict[int, DocumentEntry], path: KeyPath, inside: tuple[int, ...]
) -> dict[str | int, DocumentEntry]:
    own: dict[str | int, DocumentEntry] = {}
    merged: dict[str | int, DocumentEntry] = {}
    for key, value in node.value:
        if not isinstance(key, yaml.ScalarNode):
            raise _YamlRefused("a key must be a word - write it without brackets", key, path)
        if key.value == MERGE_KEY and not key.style:
            for child_key, child in _merged(value, built, path, inside).items():
                merged.setdefault(child_key, child)
        elif key.value in own:
            first = own[key.value]
            raise _YamlRefused(f"is there twice, first in line {first.line} - keep one", key, (*path, key.value))
        else:
            own[key.value] = _build(value, built, (*path, key.value), inside).at(key)
    return {**merged, **own}


def _merged(
    node: yaml.Node, built: dict[int, DocumentEntry], path: KeyPath, inside: tuple[int, ...]
) -> dict[str | int, DocumentEntry]:
    sources = node.value if isinstance(node, yaml.SequenceNode) else [node]
    merged: dict[str | int, DocumentEntry] = {}
    for source in sources:
        if not isinstance(source, yaml.MappingNode):
            raise _YamlRefused("`<<` takes a mapping - name one with an alias", source, path)
        for key, child in _build(source, built, path, inside).children.items():
            merged.setdefault(key, child)
    return merged


def _plain(text: str) -> Any:  # noqa: ANN401  # a YAML scalar is of any of these types
    if text in WORDS:
        return WORDS[text]
    if INTEGER.fullmatch(text):
        return int(text)
    if DECIMAL.fullmatch(text):
        return float(text)
    return text


def _with_value(values: Any, path: KeyPath, value: Any) -> Any:  # noqa: ANN401  # plain YAML values
    if not path:
        return value
    below = values if isinstance(values, dict) else {}
    return {**below, path[0]: _with_value(below.get(path[0]), path[1:], value)}


def _annotation_at(model: type[BaseModel], path: KeyPath) -> tuple[Any, FieldInfo | None]:
    """Type and field of the value at ``path`` in the model; (None, None) for an unknown path."""
    annotation: Any = model
    found: FieldInfo | None = None
    for part in path:
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            by_key = {info.alias or name: info for name, info in annotation.model_fields.items()}
            found = by_key.get(str(part))
            annotation = found.annotation if found else None
        elif get_origin(annotation) is not None:
            inner = [argument for argument in get_args(annotation) if argument is not Ellipsis]
            annotation = inner[-1] if inner else None
        else:
            annotation = None
        annotation = _bare(annotation)
    return annotation, found


def _bare(annotation: Any) -> Any:  # noqa: ANN401  # a type expression
    while hasattr(annotation, "__metadata__") or get_origin(annotation) in {UnionType, Union}:
        annotation = next(argument for argument in get_args(annotation) if argument is not NoneType)
    return annotation


def _keys_below(model: type[BaseModel], path: KeyPath) -> list[str]:
    annotation, _ = _annotation_at(model, path)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [info.alias or name for name, info in annotation.model_fields.items()]
    return []
