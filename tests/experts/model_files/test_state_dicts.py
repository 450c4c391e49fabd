"""What weights tell of themselves, and what they cannot."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from experts.backends.classifier import build_trainable, weight_shapes
from experts.backends.detector import build_trainable as build_detector
from experts.errors import WeightsRefused
from experts.model_files.formats import describe_file, served_suffix, write_weights


@pytest.fixture(scope="module")
def resnet(tmp_path_factory):
    file = tmp_path_factory.mktemp("weights") / "resnet.safetensors"
    save_file(build_trainable("resnet18", 3, stem="3x3").state_dict(), file)
    return file


def test_a_classifier_tells_its_architecture_and_no_names(resnet):
    found = describe_file(resnet)
    assert (found.kind, found.architecture, found.stem, found.label_count) == ("classifier", "resnet18", "3x3", 3)
    assert set(found.missing) == {"labels", "size", "normalize", "fit", "task", "variant"}
    assert "the 3 outputs" in found.missing["labels"]
    assert "of resnet18 with 3 labels" in found.evidence["architecture"]
    with pytest.raises(WeightsRefused, match=r"is no resnet34: .* of resnet18 with 3 labels"):
        describe_file(resnet, "resnet34")


def test_a_detector_of_ultralytics_takes_pixels_as_they_are(tmp_path):
    save_file(build_detector("yolov8n", 2).state_dict(), tmp_path / "y.safetensors")
    found = describe_file(tmp_path / "y.safetensors")
    assert (found.kind, found.architecture, found.normalize, found.label_count) == ("detector", "yolov8n", "unit", 2)
    assert set(found.missing) == {"labels", "size", "variant"}


def test_what_is_not_known_or_not_served_is_called_by_its_name(tmp_path):
    save_file({"a.weight": torch.zeros(2)}, tmp_path / "x.safetensors")
    with pytest.raises(WeightsRefused, match=r"its tensors \(a\.weight, .* fit none of .* export the model to ONNX"):
        describe_file(tmp_path / "x.safetensors")
    save_file({"blocks.0.attn.qkv.weight": torch.zeros(2)}, tmp_path / "x.safetensors")
    with pytest.raises(WeightsRefused, match=r"is a vision transformer of timm \(blocks.* export it to ONNX"):
        describe_file(tmp_path / "x.safetensors")


class TestCheckpoints:
    def saved(self, folder, **beside):
        network = torch.nn.DataParallel(build_trainable("mobilenet_v3_small", 2))
        torch.save({"model": network.state_dict(), **beside}, folder / "net.pt")
        return folder / "net.pt"

    def test_what_the_file_tells_is_taken_with_its_place(self, tmp_path):
        found = describe_file(self.saved(tmp_path, classes=["ok", "bent"], args={"img_size": 96}))
        assert (found.architecture, found.labels, found.size) == ("mobilenet_v3_small", ("ok", "bent"), (96, 96))
        assert (found.evidence["labels"], found.evidence["size"]) == ("classes", "args.img_size")
        assert set(found.missing) == {"normalize", "fit", "task", "variant"}
        assert "module. before every name was left out" in found.remarks

    def test_names_of_something_else_are_not_taken_for_labels(self, tmp_path):
        found = describe_file(self.saved(tmp_path, classes=["a", "b", "c"]))
        assert found.labels is None
        assert "labels" in found.missing
        assert "classes names 3 labels, and the weights have 2: not taken" in found.remarks

    def test_a_twin_by_its_own_word_is_served_only_if_it_is_said_to_be_none(self, tmp_path):
        """timm's resnetblur18 has the weights of resnet18, and blurs between its layers."""
        torch.save(
            {"arch": "resnetblur18", "state_dict": build_trainable("resnet18", 2).state_dict()}, tmp_path / "x.pt"
        )
        with pytest.raises(
            WeightsRefused, match=r"is a resnetblur18 \(arch\), .* those of resnet18.* export it to ONNX"
        ):
            describe_file(tmp_path / "x.pt")
        assert describe_file(tmp_path / "x.pt", "resnet18").architecture == "resnet18"

    def test_what_is_unknown_goes_by_the_name_that_it_has(self, tmp_path):
        torch.save({"arch": "resnet26", "state_dict": {"conv1.weight": torch.zeros(2)}}, tmp_path / "x.pt")
        with pytest.raises(WeightsRefused, match=r"says that it is a resnet26; its tensors \(conv1"):
            describe_file(tmp_path / "x.pt")

    def test_its_weights_are_written_without_what_wrapped_them(self, tmp_path):
        found = describe_file(self.saved(tmp_path))
        write_weights(found, tmp_path / "net.safetensors")
        assert describe_file(tmp_path / "net.safetensors").architecture == "mobilenet_v3_small"
        assert served_suffix(found) == ".safetensors"
        (tmp_path / "net.pt").rename(tmp_path / "best.pth.tar")
        assert describe_file(tmp_path / "best.pth.tar").architecture == "mobilenet_v3_small"


def test_tensors_that_share_memory_are_written_apart(tmp_path):
    from experts.model_files.state_dicts import describe_state_dict

    shared = torch.randn(1000)
    tensors = {name: torch.zeros(shape) for name, shape in weight_shapes("resnet18", 2, None, 224).items()}
    tensors["bn1.weight"], tensors["bn1.bias"] = shared[:64], shared[32:96]
    found = describe_state_dict(tmp_path / "model.pt", tensors)
    write_weights(found, tmp_path / "model.safetensors")
    assert torch.equal(load_file(tmp_path / "model.safetensors")["bn1.bias"], shared[32:96])
    assert served_suffix(found) == ".safetensors"
