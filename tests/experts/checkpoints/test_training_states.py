"""What a training kept, read apart: tensors by their keys, plain arguments; within bounds, and with nothing run."""

import argparse
import json
from collections import OrderedDict

import pytest
import torch
from safetensors import safe_open

from experts.checkpoints.reading import convert_states
from experts.checkpoints.tensors import CheckpointTensor, Storage
from experts.checkpoints.training_states import DEPTH_MAXIMUM, ENTRIES_MAXIMUM, VALUES_MAXIMUM, training_state
from experts.errors import WeightsCorrupt, WeightsRefused


class Trainers:
    """A class of a trainer's, which does something when it is unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __setstate__(self, state):
        state["marker"].touch()


def read(folder, *documents):
    """The files' tensors and what they tell, in a process of its own."""
    files = [folder / f"mp_rank_{number:02}_model_states.pt" for number in range(len(documents))]
    for file, document in zip(files, documents, strict=True):
        torch.save(document, file)
    convert_states(folder, files, folder)
    opened = [safe_open(folder / f"{file.name}.safetensors", framework="pt") for file in files]
    return [({key: one.get_tensor(key) for key in one.keys()}, json.loads(one.metadata()["args"])) for one in opened]  # noqa: SIM118


def test_several_files_are_read_in_one_process_and_run_nothing(tmp_path):
    marker = tmp_path / "it-ran"
    args = argparse.Namespace(hidden_size=8, topk=[1, 2], lr=0.5, name="x", kept=Trainers(marker), device=None)
    whole = torch.arange(6.0).reshape(2, 3)
    first = {
        "module": OrderedDict(a={"b": whole, "c": {"d.e": whole[:, 1:]}}, optimizer=Trainers(marker)),
        "optimizer": {"state": {0: torch.ones(4)}}, "args": args, "checkpoint_version": 3.0, "iteration": 7,
    }  # fmt: skip
    large = {"expert.weight": torch.ones(1000, 1000), "expert.bias": torch.ones(4, dtype=torch.bfloat16)}
    (tensors, told), (expert, nothing) = read(tmp_path, first, large)
    assert tensors.keys() == {"a.b", "a.c.d.e"}
    assert torch.equal(tensors["a.c.d.e"], whole[:, 1:])
    assert told == {"checkpoint_version": 3.0, "hidden_size": 8, "topk": [1, 2], "lr": 0.5, "name": "x"}
    assert torch.equal(expert["expert.weight"], large["expert.weight"])
    assert (expert["expert.bias"].dtype, nothing) == (torch.bfloat16, {})
    assert not marker.exists()


def test_unreadable_file_is_named(tmp_path):
    with pytest.raises(WeightsRefused, match=r"mp_rank_01_model_states\.pt: it is a list instead of a dictionary"):
        read(tmp_path, {"a": torch.ones(1)}, [torch.ones(1)])
    file = tmp_path / "mp_rank_00_model_states.pt"
    file.write_bytes(file.read_bytes()[:-200])
    with pytest.raises(WeightsCorrupt, match="mp_rank_00_model_states"):
        convert_states(tmp_path, [file], tmp_path)


def tensor():
    return CheckpointTensor(Storage("0", "F32", 1), "F32", 0, (1,), (1,))


def nested(depth):
    value = tensor()
    for _ in range(depth):
        value = {"a": value}
    return value


def in_itself():
    value = {}
    value["a"] = value["b"] = value
    return value


def test_deep_but_bounded_nesting_is_read():
    assert list(training_state("x", nested(DEPTH_MAXIMUM)).weights) == [".".join("a" * DEPTH_MAXIMUM)]


@pytest.mark.parametrize(
    "module", [nested(DEPTH_MAXIMUM + 1), in_itself(), dict.fromkeys(range(ENTRIES_MAXIMUM + 1), 0)],
    ids=["deep", "in itself", "wide"],
)  # fmt: skip
def test_nesting_beyond_any_model_is_refused(module):
    with pytest.raises(WeightsRefused, match="has over"):
        training_state("x", {"module": module})


def test_two_tensors_of_one_name_are_refused():
    with pytest.raises(WeightsRefused, match=r"two tensors named a\.b"):
        training_state("x", {"a": {"b": tensor()}, "a.b": tensor()})


def test_arguments_that_no_training_has_are_left_out():
    itself = []
    itself.append(itself)
    args = {
        "itself": itself, "huge": 10**5000, "nan": float("nan"), "long": "x" * 100_000, "fits": [1, "a"],
        "wide": [0] * (VALUES_MAXIMUM + 1), 5: "no name",
    }  # fmt: skip
    assert training_state("x", {"args": args}).arguments == {"fits": [1, "a"]}
