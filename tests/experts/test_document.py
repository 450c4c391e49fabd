"""Documents: what YAML text becomes, and where its errors point."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field

from experts.document import parse_document, read_document
from experts.errors import ConfigError

FILE = Path("line.yaml")


def parsed(text):
    return parse_document(FILE, text.encode())


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("true", True), ("false", False), ("NO", "NO"), ("on", "on"), ("Yes", "Yes"), ("'true'", "true"), ("12", 12),
        ("-3", -3), ("0402", "0402"), ("12:30", "12:30"), ("1_000", "1_000"), ("2026-01-31", "2026-01-31"),
        ("0.5", 0.5), ("1e3", 1000.0), (".5", 0.5), ("1.2.3", "1.2.3"), ("e5", "e5"), (".inf", ".inf"), ("null", None),
        ("~", None), ("", None), ("[]", []), ("9" * 5000, "9" * 5000),
    ],
)  # fmt: skip
def test_scalar_has_the_type_that_an_operator_means(text, value):
    assert parsed(f"key: {text}").values == {"key": value}


def test_every_key_and_item_has_its_line_and_column():
    document = parsed("a: 1\nb:\n  c: [x, y]\n  d:\n    - e: 5\n")
    assert (document.place("b", "c").line, document.place("b", "c").column) == (3, 3)
    assert (document.place("b", "c", 1).line, document.place("b", "c", 1).column) == (3, 10)
    assert str(document.place("b", "d", 0, "e")) == "line.yaml:5:7: b.d[0].e"


def test_anchors_and_merges_share_values_and_keep_the_place_of_use():
    document = parsed("base: &b {size: 1, kind: x}\none:\n  <<: *b\n  size: 2\ntwo: *b\n")
    assert document.values["one"] == {"size": 2, "kind": "x"}
    assert (document.values["two"], document.place("one", "size").line) == ({"size": 1, "kind": "x"}, 4)
    assert document.place("two").line == 5


LAUGHS = "\n".join(["a0: &a0 [x]"] + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 20)])


@pytest.mark.parametrize(
    ("text", "where", "words"),
    [
        ("a: 1\nb: 2\na: 3", "3:1: a", "twice, first in line 1"), ("x:\n  a: 1\n  a: 1", "3:3: x.a", "twice"),
        ("a: [1, 2\n", "2:1: syntax", "correct the syntax"), ("a: 1\n\tb: 2", "2:1: syntax", "correct the syntax"),
        ("a: !!python/object:os.system x", "1:4: a", "tag"), ("a: &a [*a]", "1:", "alias"),
        ("? [1]\n: 2", "1:3: document", "key must be a word"), ("a:\n  <<: 5", "2:7: a", "takes a mapping"),
        ("- 1\n- 2", "1:1: document", "key: value"), ("a: 1\n---\nb: 2", "2:1: syntax", "single document"),
        ("a: " + "[" * 120 + "]" * 120, "1:104: a[0]", "levels deep"), (LAUGHS, "7:", "values by its aliases"),
    ],
)  # fmt: skip
def test_unsupported_yaml_is_refused_with_its_place(text, where, words):
    with pytest.raises(ConfigError) as caught:
        parsed(text)
    assert str(caught.value).startswith(f"line.yaml:{where}")
    assert words in str(caught.value)


def test_non_utf8_byte_is_refused_with_its_place_and_an_absent_file_named(tmp_path):
    with pytest.raises(ConfigError, match=r"line\.yaml:2:4: encoding: byte 0xe4 is not UTF-8"):
        parse_document(FILE, b"a: 1\nb: \xe4\n")
    with pytest.raises(ConfigError, match=r"absent\.yaml: cannot be read"):
        read_document(tmp_path / "absent.yaml")
    assert parse_document(FILE, b"\xef\xbb\xbfa: 1").values == {"a": 1}
    assert parse_document(FILE, b"# nothing\n").values == {}


def test_endless_file_is_no_document():
    with pytest.raises(ConfigError, match="/dev/zero: has more than 16777216 bytes"):
        read_document(Path("/dev/zero"))


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid")
    width: int = Field(ge=1, description="1 or more, in mm")


class Whole(BaseModel):
    model_config = ConfigDict(extra="forbid")
    parts: dict[str, Part]
    name: str = Field(description="what it is called")


def test_all_problems_of_a_section_are_reported_at_once_with_their_places():
    document = parsed("parts:\n  a: {width: 0}\n  b:\n    widht: 4\n")
    with pytest.raises(ConfigError) as caught:
        document.validate(Whole)
    lines = str(caught.value).splitlines()
    assert len(lines) == len(caught.value.problems) == 4
    assert lines[0].startswith("line.yaml:2:7: parts.a.width: Input should be greater than or equal to 1, not 0")
    assert lines[1] == "line.yaml:3:3: parts.b.width: is missing - 1 or more, in mm"
    assert lines[2] == "line.yaml:4:5: parts.b.widht: unknown key - did you mean 'width'?"
    assert lines[3] == "line.yaml:1:1: name: is missing - what it is called"
    assert caught.value.place == caught.value.problems[0].place


def test_override_wins_and_its_errors_name_the_variable():
    document = parsed("name: x\nparts: {a: {width: 2}}").override(("parts", "a", "width"), "7", "X__WIDTH")
    assert document.validate(Whole).parts["a"].width == 7
    with pytest.raises(ConfigError, match=r"^environment variable X__WIDTH: parts\.a\.width: .* not -1"):
        document.override(("parts", "a", "width"), "-1", "X__WIDTH").validate(Whole)
    with pytest.raises(ConfigError, match=r"environment variable X__WIDTH: .*quote"):
        document.override(("name",), "[1", "X__WIDTH")


@given(st.binary(max_size=200))
def test_any_bytes_are_a_document_or_a_config_error(content):
    try:
        values = parse_document(FILE, content).values
    except ConfigError:
        return
    assert isinstance(values, dict)


@given(
    st.dictionaries(
        st.text("abc0-_.", min_size=1, max_size=5), st.integers() | st.text("xyz ", max_size=5) | st.booleans(),
        max_size=5,
    )
)  # fmt: skip
def test_document_written_as_json_is_read_back(values):
    assert parsed(json.dumps(values)).values == values
