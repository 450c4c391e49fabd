"""How many fields a message has, against what protobuf itself writes."""

from hypothesis import given
from hypothesis import strategies as some

from agent.api.calls.door import has_more_fields
from agent.api.proto import inference_pb2 as oip

inputs = some.builds(
    oip.ModelInferRequest.InferInputTensor,
    name=some.text(max_size=5) | some.just("x" * 300),
    shape=some.lists(some.integers(-(2**63), 2**63 - 1), max_size=3),
)
requests = some.builds(
    oip.ModelInferRequest,
    model_name=some.text(min_size=1, max_size=5),
    inputs=some.lists(inputs, max_size=4),
    raw_input_contents=some.lists(some.binary(max_size=200), max_size=4),
)


@given(requests)
def test_each_field_counts_once_whatever_lies_in_it(request):
    written = request.SerializeToString()
    fields = 1 + len(request.inputs) + len(request.raw_input_contents)
    assert not has_more_fields(written, fields)
    assert has_more_fields(written, fields - 1)


@given(some.binary(max_size=200), some.integers(0, 50))
def test_whatever_the_bytes_are_it_answers(message, most):
    assert has_more_fields(message, most) in {True, False}
    assert not has_more_fields(message, len(message))


def test_a_number_without_an_end_ends_where_the_longest_would():
    assert has_more_fields(b"\xff" * 1000, 99)
    assert not has_more_fields(b"\xff" * 1000, 100)
