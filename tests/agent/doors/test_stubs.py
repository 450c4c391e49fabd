"""The stubs are those of the sources beside them."""

import hashlib
import re
from pathlib import Path

import pytest
from tritonclient.grpc import model_config_pb2, service_pb2

from agent.doors.proto import inference_pb2

ROOT = Path(__file__).parents[3]
STUBS = ROOT / "agent" / "doors" / "proto"
MADE_OF = re.compile(r"^# Made by `make proto`, not by hand\. Source: (\S+)\n# sha256 of the source: (\w{64})\n")


def messages(file):
    """Each message's name with its fields: number, name, label, type, type's name."""
    waiting = list(file.message_types_by_name.values())
    for message in waiting:  # and those within, which are found on the way
        waiting += message.nested_types
    return {
        each.full_name: {(f.number, f.name, f.label, f.type, f.message_type and f.message_type.full_name)
                         for f in each.fields}
        for each in waiting
    }  # fmt: skip


@pytest.mark.parametrize("stub", sorted(STUBS.glob("*_pb2*")), ids=lambda stub: stub.name)
def test_stub_is_generated_from_the_current_source(stub):
    source, sha256 = MADE_OF.match(stub.read_text("utf-8")).groups()
    assert hashlib.sha256((STUBS / source).read_bytes()).hexdigest() == sha256


def test_open_inference_protocol_is_the_public_one():
    """Every message that is restated has the fields of the public client's, or fewer; and so has every method."""
    public = messages(service_pb2.DESCRIPTOR) | messages(model_config_pb2.DESCRIPTOR)
    ours = messages(inference_pb2.DESCRIPTOR)
    assert len(ours) > 40
    assert {name: fields - public[name] for name, fields in ours.items() if fields - public[name]} == {}
    enum = inference_pb2.DESCRIPTOR.enum_types_by_name["DataType"].values_by_name
    theirs = model_config_pb2.DESCRIPTOR.enum_types_by_name["DataType"].values_by_name
    assert {name: theirs[name].number for name in enum} == {name: value.number for name, value in enum.items()}
    service = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods_by_name
    for method in inference_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods:
        other = service[method.name]
        assert method.input_type.full_name == other.input_type.full_name
        assert method.output_type.full_name == other.output_type.full_name
        assert (method.client_streaming, method.server_streaming) == (other.client_streaming, other.server_streaming)
