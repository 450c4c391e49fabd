"""What trainers save, read in a process of its own: the weights are torch's own, and what the file tells is told."""

import argparse
import collections
import copy
import zipfile

import pytest
import torch
from torchvision import models

from experts.checkpoints.reading import read_checkpoint
from experts.errors import WeightsRefused

LABELS = ("good", "bad", "odd")


@pytest.fixture(scope="module")
def network():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return models.mobilenet_v3_small(num_classes=3).eval()


def saved(folder, document, **options):
    torch.save(document, folder / "x.pt", **options)
    return folder / "x.pt"


def same(found, state_dict):
    return found.weights.keys() == state_dict.keys() and all(
        found.weights[name].dtype == tensor.dtype and torch.equal(found.weights[name], tensor)
        for name, tensor in state_dict.items()
    )


def prefixed(state_dict, prefix):
    return collections.OrderedDict((prefix + name, tensor) for name, tensor in state_dict.items())


class TestWeights:
    @pytest.mark.parametrize(
        "key", ["state_dict", "model", "model_state_dict", "ema", "net", "module", "weights", "my_own"]
    )
    def test_weights_under_a_key_are_found(self, tmp_path, network, key):
        found = read_checkpoint(saved(tmp_path, {"epoch": 3, key: network.state_dict(), "optimizer": {"state": {}}}))
        assert same(found, network.state_dict())
        assert found.where == key

    @pytest.mark.parametrize("zipped", [True, False])
    def test_weights_that_are_the_file_itself_are_found(self, tmp_path, network, zipped):
        for document, framework in ((network.state_dict(), None), (network, "torchvision")):
            found = read_checkpoint(saved(tmp_path, document, _use_new_zipfile_serialization=zipped))
            assert same(found, network.state_dict())
            assert (found.where, found.facts.framework) == ("the file itself", framework)

    @pytest.mark.parametrize(
        ("document", "said"),
        [
            (lambda it: {"model": torch.nn.DataParallel(it)}, "module. before every name was left out"),
            (
                lambda it: {"net": prefixed(torch.compile(it, backend="eager").state_dict(), "module.")},
                "module._orig_mod. before every name was left out",
            ),
            (
                lambda it: {"model": it.state_dict(), "ema": dict(it.named_parameters())},
                "what ema lacks was taken from model",
            ),
            (lambda it: {"net": it.state_dict(), "best": torch.tensor(0.9)}, "the weights under net were taken"),
        ],
        ids=["a whole module in what wraps it", "compiled and wrapped", "an average of parameters", "beside a number"],
    )
    def test_wrapped_weights_are_found(self, tmp_path, network, document, said):
        found = read_checkpoint(saved(tmp_path, document(network)))
        assert same(found, network.state_dict())
        assert said in found.remarks

    def test_average_is_preferred_to_its_network(self, tmp_path, network):
        average = copy.deepcopy(network)
        torch.nn.init.zeros_(average.classifier[3].bias)
        document = {"model": network.state_dict(), "ema": {"module": average.state_dict(), "updates": 7}}
        found = read_checkpoint(saved(tmp_path, document))
        assert same(found, average.state_dict())
        assert (found.where, found.remarks[1]) == ("ema.module", "model has weights, too: left out")

    def test_non_persistent_buffers_are_no_weights(self, tmp_path):
        module = torch.nn.Linear(2, 2)
        module.register_buffer("passing", torch.ones(3), persistent=False)
        module.register_buffer("kept", torch.ones(3))
        assert same(read_checkpoint(saved(tmp_path, module)), module.state_dict())

    def test_names_views_and_types_are_written_unchanged(self, tmp_path):
        base = torch.arange(24).reshape(4, 6)
        tensors = {
            "turned": base.t(), "part": base[1:3, ::2], "half": base.half(), "brain": base.bfloat16().t(),
            "yes": base > 3, "point": torch.tensor(2.5), "none": torch.empty(0, 3), "spread": torch.ones(1).expand(4),
        }  # fmt: skip
        numbered = {"model.0.weight": torch.ones(2), "model.1.weight": torch.ones(3)}
        for document in (tensors, numbered):
            assert same(read_checkpoint(saved(tmp_path, document)), document)

    def test_file_without_weights_is_refused_by_what_it_holds(self, tmp_path):
        for document, told in (
            ({"epoch": 3, "lr": 0.1}, "a dictionary of epoch, lr"),
            ({"a": torch.ones(1), "b": {"c": 1}}, "entry 'b' is a dict"),
            ([torch.ones(1)], "a list instead of a state dict"),
            ({"left": {"a": torch.ones(1)}, "right": {"a": torch.ones(1)}}, "under left, right"),
            (argparse.Namespace(rate=0.1), "argparse.Namespace"),
            ({"a": torch.ones(2).to_sparse()}, "torch._utils._rebuild_sparse_tensor"),
        ):
            with pytest.raises(WeightsRefused, match=told):
                read_checkpoint(saved(tmp_path, document))


class TestStatedFacts:
    def test_ultralytics_checkpoint_states_its_facts(self, trained):
        from ultralytics import YOLO

        found = read_checkpoint(trained / "best.pt")
        assert same(found, YOLO(trained / "best.pt").model.half().state_dict())
        facts = found.facts
        assert (facts.framework, facts.task, facts.architecture) == ("ultralytics", "detect", "yolov8n")
        assert facts.labels == ("aligned", "shifted", "tilted")
        assert (facts.size, facts.normalize, found.where) == ((64, 64), "unit", "model")
        assert (facts.evidence["labels"], facts.evidence["architecture"]) == ("model.names", "model.yaml")

    def test_unfinished_ultralytics_checkpoint_states_its_facts(self, trained):
        found = read_checkpoint(trained / "unfinished.pt")
        assert (found.where, found.facts.architecture) == ("ema", "yolov8n")

    def test_lightning_checkpoint_states_its_facts(self, tmp_path, network):
        document = {
            "epoch": 1, "global_step": 10, "pytorch-lightning_version": "2.5.0", "loops": {}, "callbacks": {},
            "state_dict": prefixed(network.state_dict(), "network_of_mine."), "optimizer_states": [],
            "lr_schedulers": [], "hparams_name": "kwargs",
            "hyper_parameters": {
                "arch": "mobilenet_v3_small", "class_names": list(LABELS), "image_size": [96, 128], "lr": 0.1,
                "mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225),
            },
        }  # fmt: skip
        found = read_checkpoint(saved(tmp_path, document))
        assert same(found, network.state_dict())
        facts = found.facts
        assert (facts.framework, facts.labels, facts.size) == ("lightning", LABELS, (96, 128))
        assert (facts.architecture, facts.normalize) == ("mobilenet_v3_small", "imagenet")
        assert facts.evidence["labels"] == "hyper_parameters.class_names"

    def test_model_that_carries_its_configuration_states_its_facts(self, tmp_path, network):
        """As timm's do."""
        module = copy.deepcopy(network)
        module.pretrained_cfg = {
            "architecture": "mobilenet_v3_small", "input_size": (3, 96, 64), "mean": (0.485, 0.456, 0.406),
            "std": (0.229, 0.224, 0.225), "num_classes": 1000,
        }  # fmt: skip
        facts = read_checkpoint(saved(tmp_path, module)).facts
        assert (facts.architecture, facts.size, facts.normalize) == ("mobilenet_v3_small", (96, 64), "imagenet")
        assert facts.evidence["size"] == "the file itself.pretrained_cfg.input_size"

    def test_arguments_of_a_script_state_facts(self, tmp_path, network):
        arguments = argparse.Namespace(model="mobilenet_v3_small", val_crop_size=96, rate=0.1)
        document = {"model": network.state_dict(), "args": arguments, "class_to_idx": {"good": 0, "odd": 2, "bad": 1}}
        facts = read_checkpoint(saved(tmp_path, document)).facts
        assert (facts.architecture, facts.size, facts.labels) == ("mobilenet_v3_small", (96, 96), LABELS)

    @pytest.mark.parametrize(
        ("labels", "size"),
        [
            (5, 0), ([1, 2], -1), ({0: "a", 2: "b"}, True), ({}, "64"), ([], [1 << 40, 3]), ({"a": "b"}, [[1], 2]),
            (["a", None], 1.5), ("ab", []), ({"a": 1}, None),
        ],
    )  # fmt: skip
    def test_invalid_labels_or_size_are_not_stated(self, tmp_path, network, labels, size):
        document = {"model": network.state_dict(), "classes": labels, "imgsz": size}
        facts = read_checkpoint(saved(tmp_path, document)).facts
        assert (facts.labels, facts.size) == (None, None)

    @pytest.mark.parametrize(
        ("arguments", "problem"),
        [
            ({"loss": "bce_with_logits"}, "multilabel"), ({"criterion": torch.nn.BCEWithLogitsLoss()}, "multilabel"),
            ({"criterion": torch.nn.CrossEntropyLoss()}, "multiclass"),
            ({"loss_fn": "torch.nn.functional.cross_entropy"}, "multiclass"),
            ({"loss": "binary_cross_entropy"}, "multilabel"),
            ({"problem_type": "multi_label_classification"}, "multilabel"), ({"task": "multiclass"}, "multiclass"),
            ({"pos_weight": [1.0, 2.0]}, "multilabel"), ({"final_activation": "Sigmoid"}, "multilabel"),
            ({"multi_label": True}, "multilabel"), ({"loss": "focal", "activation": "relu", "pos_weight": None}, None),
            ({"loss": "subcenter_arcface", "task": "classify"}, None),
        ],
    )  # fmt: skip
    def test_loss_or_activation_states_whether_labels_are_exclusive(self, tmp_path, network, arguments, problem):
        document = {"state_dict": network.state_dict(), "hyper_parameters": arguments}
        facts = read_checkpoint(saved(tmp_path, document)).facts
        assert facts.problem == problem
        assert problem is None or facts.evidence["problem"].startswith("hyper_parameters.")

    def test_weights_of_a_loss_are_noted_and_left_out(self, tmp_path, network):
        weights = prefixed(network.state_dict(), "net.") | {"criterion.pos_weight": torch.ones(3)}
        found = read_checkpoint(saved(tmp_path, {"state_dict": weights}))
        assert same(found, network.state_dict())
        assert found.facts.problem == "multilabel"
        assert "criterion.pos_weight is of a loss: left out" in found.remarks


class TestBounds:
    def test_memory_beyond_the_need_of_weights_is_refused_in_one_line(self, tmp_path):
        numbers = b"".join(b"J" + number.to_bytes(4, "little") + b"N" for number in range(100_000))
        copies = b"0cbuiltins\ndict\nq\x01" + b"h\x01h\x00\x85R" * 1000  # of a dictionary, written as eight bytes each
        stream = b"\x80\x02}(" + numbers + b"uq\x00" + copies + b"."
        with zipfile.ZipFile(tmp_path / "x.pt", "w") as archive:
            archive.writestr("x/data.pkl", stream)
        with pytest.raises(WeightsRefused, match="over 2 GB of memory") as raised:
            read_checkpoint(tmp_path / "x.pt")
        assert "\n" not in str(raised.value)

    def test_tensors_that_repeat_one_storage_endlessly_are_refused(self, tmp_path):
        base = torch.zeros(1_000_000)
        with pytest.raises(WeightsRefused, match="no expert has"):
            read_checkpoint(saved(tmp_path, {str(number): base[:] for number in range(40)}))

    def test_module_repeated_or_nested_endlessly_is_refused(self, tmp_path):
        repeated, inside_itself = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
        inside_itself._modules["again"] = inside_itself
        for _ in range(40):
            repeated = torch.nn.Sequential(repeated, repeated)
        for module, reason in ((repeated, "over 200000 tensors"), (inside_itself, "deep")):
            with pytest.raises(WeightsRefused, match=reason):
                read_checkpoint(saved(tmp_path, module))
