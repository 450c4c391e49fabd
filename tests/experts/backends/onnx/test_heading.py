"""Headings of ONNX files: read without a runtime, whatever the file holds."""

from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import helper, load_from_string

from experts.backends.onnx import layouts
from experts.backends.onnx.heading import FLOAT, INT64, Heading, Value, read_heading
from experts.backends.onnx.layouts import image_facts
from experts.errors import WeightsCorrupt
from experts.packed.image_facts import KeptImageFacts
from tests.experts.onnx_text import model_of


def model(**notes):
    made = model_of(
        """graph (float[n,3,8,8] images, float[1] weight) => (float[n,3,?,8] sum, int64[4] extents, float open) {
            sum = Add(images, weight)
            extents = Shape(sum)
        }""",
        weight=[1.0],
    )
    made.graph.output[-1].type.tensor_type.ClearField("shape")
    helper.set_model_props(made, notes)
    return made.SerializeToString()


@pytest.fixture(scope="module")
def heading_of(tmp_path_factory):
    path = tmp_path_factory.mktemp("heading") / "x.onnx"

    def read(content):
        path.write_bytes(content)
        return read_heading("det/x", path)

    return read


def test_heading_is_the_file_without_its_weights(heading_of):
    found = heading_of(model(task="detect"))
    assert found.inputs == (Value("images", FLOAT, (None, 3, 8, 8)),)
    assert found.outputs == (
        Value("sum", FLOAT, (None, 3, None, 8)), Value("extents", INT64, (4,)), Value("open", FLOAT, None),
    )  # fmt: skip
    assert dict(found.metadata) == {"task": "detect"}


def test_negative_extent_is_an_open_one(heading_of):
    made = load_from_string(model())
    made.graph.input[0].type.tensor_type.shape.dim[0].dim_value = -1
    assert heading_of(made.SerializeToString()).inputs == (Value("images", FLOAT, (None, 3, 8, 8)),)


@pytest.mark.parametrize(
    ("names", "labels"),
    [
        ("{0: 'ok', 1: 'missing'}", ("ok", "missing")), ("{1: 'missing', 0: 'ok'}", ("ok", "missing")),
        ("['ok', 'missing']", ("ok", "missing")), ("{0: 'ok', 2: 'missing'}", None),
        ("__import__('os').getcwd()", None), ("(" * 10_000, None), ("{}", None),
    ],
)  # fmt: skip
def test_names_are_labels_in_order_or_nothing(heading_of, names, labels):
    assert heading_of(model(names=names)).names == labels


@st.composite
def damaged(draw):
    content = bytearray(model(task="detect", names="{0: 'ok'}"))
    for place in draw(st.lists(st.integers(0, 10_000), max_size=4)):
        content[place % len(content)] = draw(st.integers(0, 255))
    return bytes(content[: draw(st.integers(0, 10_000)) or None])


@given(damaged() | st.binary(max_size=200))
def test_any_file_is_a_heading_or_corrupt(heading_of, content):
    with suppress(WeightsCorrupt):
        assert isinstance(heading_of(content), Heading)


def test_facts_of_a_file_are_read_once_until_it_or_its_labels_change(files, tmp_path, monkeypatch):
    expert = files.onnx("cls/a")
    KeptImageFacts(tmp_path).keep([expert, files.onnx("cls/gone")])
    KeptImageFacts(tmp_path).keep([expert])
    read = []
    monkeypatch.setattr(layouts, "read_heading", lambda *given: read.append(given) or read_heading(*given))
    kept = KeptImageFacts(tmp_path)
    assert (kept.of(expert).applied(expert.pixels), read) == (expert.pixels, [])
    kept.of(replace(expert, labels=(*expert.labels[:-1], "other")))
    expert.weights.write_bytes(expert.weights.read_bytes())
    kept.of(expert)
    assert (len(read), kept.of(files.onnx("cls/gone")).fit, len(read)) == (2, None, 3)


def test_unreadable_cache_of_facts_costs_one_read_of_the_file(files, tmp_path):
    expert = files.onnx("cls/a")
    (tmp_path / "onnx-images.json").write_bytes(b"[broken")
    for folder in (None, tmp_path, tmp_path / "none"):
        kept = KeptImageFacts(folder)
        kept.keep([expert])
        assert kept.of(expert) == image_facts(expert)
