"""Edits to a line file: the change is made, and nothing else changes, to the byte."""

from itertools import takewhile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agent.line_file.editing import add_expert, append, edit_file, remove, rendered, set_key
from experts.document import parse_document
from experts.errors import ConfigError

FILE = Path("line.yaml")
EXAMPLE = Path(__file__).parents[3] / "configs" / "line.yaml"
ENTRY = {
    "architecture": "resnet18",
    "weights": "weights/new one.safetensors",
    "labels": ["ok", "no", "0402", "1e3"],
    "input": {"size": [64, 64], "normalize": "imagenet"},
}


def values(text):
    return parse_document(FILE, text.encode()).values


def same_start(one, other):
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def is_insertion(old, new):
    """Whether ``new`` is ``old`` with text inserted at one place."""
    return len(new) >= len(old) and new.endswith(old[same_start(old, new) :])


def test_added_expert_is_at_the_end_of_its_section():
    text = EXAMPLE.read_text()
    added = add_expert(text, "cls/new", ENTRY, "resnet18, by its tensors\nsure of it", file=FILE)
    assert is_insertion(text, added)
    assert (
        "  cls/new:\n"
        "    # resnet18, by its tensors\n"
        "    # sure of it\n"
        "    architecture: resnet18\n"
        "    weights: weights/new one.safetensors\n"
        "    labels: [ok, no, 0402, '1e3']\n"
        "    input: {size: [64, 64], normalize: imagenet}\n"
        "\nroutes:"
    ) in added
    assert values(added)["experts"]["cls/new"] == ENTRY
    assert remove(added, ("experts", "cls/new"), file=FILE) == text


@pytest.mark.parametrize(
    ("text", "path", "value", "expected"),
    [
        ("", ("a",), 1, "a: 1\n"),
        ("# only words\n", ("a",), 1, "# only words\na: 1\n"),
        ("a: 1", ("b",), 2, "a: 1\nb: 2\n"),
        ("a:\n", ("a", "b"), 2, "a:\n  b: 2\n"),
        ("a:  # why\nb: 1\n", ("a", "c"), 2, "a:  # why\n  c: 2\nb: 1\n"),
        ("a:  # why\nb: 1\n", ("a",), 2, "a: 2  # why\nb: 1\n"),
        ("a: {}  # why\n", ("a", "c"), 2, "a: {c: 2}  # why\n"),
        ("a: {b: 1,}\n", ("a", "c"), 2, "a: {b: 1, c: 2,}\n"),
        ("a:  # why\n  b: 1  # one\nc: 2\n", ("a",), [1], "a: [1]  # why\nc: 2\n"),
        ("a: |\n  words # of it\n\nb: 1\n", ("a",), "x", "a: x\n\nb: 1\n"),
        ("- a\r\n", (0,), 1, None),
        ("a: 1\r\nb: 2\r\n", ("c",), {"d": "ä"}, "a: 1\r\nb: 2\r\nc: {d: 'ä'}\r\n"),
        ("\ufeffa: ä\nb: 1\n", ("b",), 2, "\ufeffa: ä\nb: 2\n"),
        ("a:\n- 1\n- 2\nb: 1\n", ("a", 1), 3, "a:\n- 1\n- 3\nb: 1\n"),
        ("a: &x {b: 1}\nc: 2\n", ("c",), 3, "a: &x {b: 1}\nc: 3\n"),
        ("a: &x {b: 1}\nc: *x\n", ("c",), 3, "a: &x {b: 1}\nc: 3\n"),
        ("a: &x {b: 1}\nc: {<<: *x}\n", ("c", "b"), 3, "a: &x {b: 1}\nc: {<<: *x, b: 3}\n"),
    ],
)
def test_key_is_set_or_refused_by_the_form_of_its_section(text, path, value, expected):
    if expected is None:
        with pytest.raises(ConfigError, match="must be `key: value` lines"):
            set_key(text, path, value, file=FILE)
        return
    assert set_key(text, path, value, file=FILE) == expected


@pytest.mark.parametrize(
    ("text", "path", "reason"),
    [
        ("a: &x {b: 1}\nc: *x\n", ("c", "b"), r"line.yaml:2:1: c: is behind the alias \*x"),
        ("a: &x {b: 1}\nc: *x\n", ("a", "b"), r"line.yaml:1:8: a.b: cannot be edited without changing other"),
        ("a: &x {b: 1}\nc: *x\n", ("a",), r"line.yaml:1:1: a: cannot be edited as it is written"),
        ("a: 1\n", ("a", "b"), r"line.yaml:1:1: a: has no place for 'b'"),
        ("a: 1\nb: [\n", ("a",), r"line.yaml:3:1: syntax"),
        ("a: 1\n", ("b",), "cannot be edited without"),
    ],
)
def test_uneditable_key_is_reported_with_its_place(text, path, reason):
    value = float("nan") if path == ("b",) else 7
    with pytest.raises(ConfigError, match=reason):
        set_key(text, path, value, file=FILE)


def test_file_is_edited_through_its_link_keeping_permissions(tmp_path):
    real, link = tmp_path / "real.yaml", tmp_path / "line.yaml"
    real.write_bytes(b"a: 1\r\n")
    real.chmod(0o640)
    link.symlink_to(real)
    edit_file(link, lambda text: set_key(text, ("b",), 2, file=link))
    assert link.is_symlink()
    assert (real.read_bytes(), real.stat().st_mode & 0o777) == (b"a: 1\r\nb: 2\r\n", 0o640)


def test_refused_edit_leaves_the_file(tmp_path):
    file = tmp_path / "line.yaml"
    file.write_text("a: 1\n")
    with pytest.raises(ConfigError):
        edit_file(file, lambda text: remove(text, ("b",), file=file))
    assert (file.read_text(), [each.name for each in tmp_path.iterdir()]) == ("a: 1\n", ["line.yaml"])


WORDS = st.text(st.characters(exclude_categories=["Cs", "Cn"]), max_size=8)
SCALARS = WORDS | st.integers(-1000, 1000) | st.booleans() | st.none() | st.floats(-1e6, 1e6, allow_nan=False)
KEYS = st.from_regex(r"[a-z][a-z0-9/.-]{0,5}", fullmatch=True)
PLAIN = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)


@given(PLAIN)
def test_rendered_value_reads_back(value):
    assert values(f"key: {rendered(value)}\n")["key"] == value


@st.composite
def documents(draw):
    """A line file in any style: in blocks and braces, with comments and blank lines, with either line end."""
    root = draw(st.dictionaries(KEYS, PLAIN, min_size=1, max_size=4))
    lines = _written(draw, root, 0)
    end = draw(st.sampled_from(["\n", "\r\n"]))
    text = end.join(lines) + draw(st.sampled_from(["", end, end + end, f"{end}# the end"]))
    return text, root


def _written(draw, mapping, column):
    indent, lines = " " * column, []
    step = draw(st.integers(1, 4))
    for key, value in mapping.items():
        lines += draw(st.sampled_from([[], [""], [f"{indent}# of {key}"], ["# at the edge"]]))
        beside = draw(st.sampled_from(["", "  # beside: {it}"]))
        if isinstance(value, dict) and value and draw(st.booleans()):
            lines += [f"{indent}{key}:{beside}", *_written(draw, value, column + step)]
        elif isinstance(value, list) and value and draw(st.booleans()):
            dash = " " * (column + draw(st.sampled_from([0, step])))
            lines += [f"{indent}{key}:{beside}", *(f"{dash}-   {rendered(each)}{beside}" for each in value)]
        else:
            lines.append(f"{indent}{key}: {rendered(value)}{beside}")
    return lines


def _paths(value, path=()):
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(each for key, below in inside for each in _paths(below, (*path, key)))]


def _at(value, path):
    for part in path:
        value = value[part]
    return value


GENERATED = settings(suppress_health_check=[HealthCheck.too_slow])


@GENERATED
@given(documents(), PLAIN, st.data())
def test_new_key_is_added_and_removed_again(document, value, data):
    text, root = document
    mapping = data.draw(st.sampled_from([each for each in _paths(root) if isinstance(_at(root, each), dict)]))
    path = (*mapping, "NEW")
    added = set_key(text, path, value, file=FILE)
    assert is_insertion(text, added) or not _at(root, mapping)
    assert _at(values(added), path) == value
    assert values(remove(added, path, file=FILE)) == root
    if _at(root, mapping) and text.endswith("\n") and "{" not in text:
        assert remove(added, path, file=FILE) == text


@GENERATED
@given(documents(), SCALARS, st.data())
def test_changed_value_leaves_the_text_around_it(document, value, data):
    text, root = document
    path = data.draw(st.sampled_from([each for each in _paths(root) if each]))
    changed = set_key(text, path, value, file=FILE)
    assert _at(values(changed), path) == value
    if not isinstance(_at(root, path), dict | list | None):
        old = rendered(_at(root, path))
        around = same_start(text, changed) + same_start(text[::-1], changed[::-1])
        assert around >= len(text) - len(old)


@GENERATED
@given(documents(), st.data())
def test_removed_key_is_gone_and_nothing_else(document, data):
    text, root = document
    path = data.draw(st.sampled_from([each for each in _paths(root) if each]))
    left = values(remove(text, path, file=FILE))
    del _at(root, path[:-1])[path[-1]]
    assert left == root


@GENERATED
@given(documents(), PLAIN, st.data())
def test_added_item_is_last(document, value, data):
    text, root = document
    lists = [each for each in _paths(root) if isinstance(_at(root, each), list)]
    path = data.draw(st.sampled_from(lists)) if lists else ("NEW",)
    changed = append(text, path, value, file=FILE)
    assert _at(values(changed), path)[-1] == value
    assert is_insertion(text, changed) or not _at(root, path)
