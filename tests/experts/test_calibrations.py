"""Calibrations as files: what is written is read, and whatever is torn or foreign counts as absent."""

import json
from dataclasses import asdict

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from experts.calibrations import FORMAT, Calibration, CalibrationFolder, CallRanges, Range, read_calibration

FOUND = Calibration(
    "ab" * 32,
    "ef" * 32,
    '{"height": 8, "width": 8}',
    "cd" * 32,
    16,
    ("bad", "ok"),
    {
        "onednn-int8": {
            "conv1.weight": CallRanges(Range(-2.1, 2.6), Range(0.0, 7.25), shifts=(0.0, -1.5e-3)),
            "layer1.0.conv2.weight": CallRanges(Range(0.0, 1e-30), Range(-3.0, 0.0), Range(-1.0, 0.1)),
        },
        "onnxruntime-int8": {"images": CallRanges(Range(-2.1, 2.6), Range(-2.1, 2.6))},
    },
)
DOCUMENT = json.dumps({"format": FORMAT, **asdict(FOUND)})

NUMBERS = st.integers() | st.floats() | st.sampled_from([10**400, -(10**400), 1e308])
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3), max_leaves=5,
)  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    return CalibrationFolder.beside(tmp_path / "packed")


def places(document, above=()):
    yield above
    entries = document.items() if isinstance(document, dict) else enumerate(document if type(document) is list else ())
    for key, each in entries:
        yield from places(each, (*above, key))


def with_other(document, place, value):
    """The document with a value in that place; without the place where the value is KeyError."""
    if not place:
        return value
    key, *rest = place
    changed = document.copy()
    if not rest and value is KeyError:
        del changed[key]
    else:
        changed[key] = with_other(document[key], rest, value)
    return changed


@pytest.mark.parametrize("name", ["", "/", "cls/", "/x", "cls//x", "..", "../x", "cls/../../x", "cls/.", "cls/x\0y"])
def test_invalid_expert_id_has_no_calibration_file(folder, name):
    with pytest.raises(ValueError, match="cannot be an expert's id: it is not kind/name"):
        folder.path(name)


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"[]", b"{}", b"null", b"\x00\xff", b'"text"', DOCUMENT.encode()[:-1], b"[" * 100_000,
        DOCUMENT.replace("7.25", "NaN").encode(), DOCUMENT.replace("7.25", "Infinity").encode(),
        DOCUMENT.replace("7.25", "-1").encode(), DOCUMENT.replace("7.25", f"1{'0' * 400}").encode(),
        DOCUMENT.replace("16", "Infinity").encode(), DOCUMENT.replace('"stamp"', '"changed"').encode(),
        DOCUMENT.replace("-0.0015", "NaN").encode(), DOCUMENT.replace("-0.0015", '"x"').encode(),
    ],
)  # fmt: skip
def test_damaged_calibration_counts_as_absent(folder, content):
    folder.write("cls/x", FOUND)
    folder.path("cls/x").write_bytes(content)
    assert folder.read("cls/x") is None


def test_calibration_of_another_format_counts_as_absent(folder):
    folder.write("cls/x", FOUND)
    assert (folder.read("cls/x"), folder.read("cls/y")) == (FOUND, None)
    path = folder.path("cls/x")
    before = {key: each for key, each in json.loads(path.read_text()).items() if key != "format"}  # as once written
    for document in (before, {**before, "format": FORMAT - 1}, {**before, "format": FORMAT + 1}):
        path.write_text(json.dumps(document))
        assert folder.read("cls/x") is None
    path.write_text(json.dumps({**before, "format": FORMAT}))
    assert folder.read("cls/x") == FOUND


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(place=st.sampled_from(list(places(json.loads(DOCUMENT)))), value=VALUES | st.just(KeyError))
def test_any_document_is_a_calibration_or_absent(tmp_path, place, value):
    document = {} if (place, value) == ((), KeyError) else with_other(json.loads(DOCUMENT), place, value)
    (tmp_path / "x.json").write_text(json.dumps(document))
    found = read_calibration(tmp_path / "x.json")
    if found is not None:  # whole: a form of eight bits can be made by it, and it can be written again
        ranges = [pair for of_form in found.ranges.values() for pair in of_form.items()]
        assert all(isinstance(name, str) and isinstance(each, CallRanges) for name, each in ranges)
        json.dumps(asdict(found), allow_nan=False)


@pytest.mark.parametrize(("low", "high"), [(1.0, 0.0), (float("nan"), 1.0), (0.0, float("inf")), (-float("inf"), 0.0)])
def test_range_is_of_finite_numbers(low, high):
    with pytest.raises(ValueError, match="have no levels"):
        Range(low, high)
    for shift in {low, high} - {0.0, 1.0}:
        with pytest.raises(ValueError, match="is NaN or infinite"):
            CallRanges(Range(0.0, 1.0), Range(0.0, 1.0), shifts=(0.0, shift))


def test_range_around_others_holds_them_and_no_more():
    assert Range.around([Range(-1.0, 0.5), Range(0.0, 3.0), Range(2.0, 2.0)]) == Range(-1.0, 3.0)
    with pytest.raises(ValueError, match="empty"):
        Range.around([])
