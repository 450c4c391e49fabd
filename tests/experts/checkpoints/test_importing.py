"""Importing weights: pickles become tensors in a process of their own, or are refused."""

import hashlib
import os
import pickle

import pytest
import torch
from safetensors.torch import load_file, save_file

from experts.checkpoints.importing import bring
from experts.errors import LoadError, WeightsCorrupt, WeightsMissing, WeightsRefused


class Malicious:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


def saved(path, document):
    torch.save(document, path)
    return path


def test_state_dict_becomes_safetensors(tmp_path):
    tensors = {"a": torch.randn(3), "b": torch.arange(4)}
    tensors["tied"] = tensors["a"]
    tensors["part"] = torch.randn(4, 4).t()[1:]
    target = tmp_path / "out" / "x.safetensors"
    sha256 = bring(saved(tmp_path / "x.pt", tensors), target).sha256
    found = load_file(target)
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    assert sha256 == hashlib.sha256(target.read_bytes()).hexdigest()


def test_import_over_a_file_with_labels_in_another_order_is_noted(tmp_path):
    target, weights = tmp_path / "x.safetensors", {"a": torch.ones(2)}

    def remarks(*labels):
        return bring(saved(tmp_path / "x.pt", {"state_dict": weights, "classes": list(labels)}), target).remarks

    assert not any("labels" in each for each in (*remarks("ok", "bent"), *remarks("ok", "bent")))
    assert remarks("bent", "ok")[-1].startswith(
        "its labels are bent, ok, and those of the file that it replaced were ok,"
    )


def test_malicious_pickle_is_refused_and_does_not_run(tmp_path):
    marker, target = tmp_path / "it-ran", tmp_path / "x.safetensors"
    wrapped = saved(tmp_path / "zip.pt", {"a": torch.ones(1), "b": Malicious(marker)})
    bare = tmp_path / "bare.pt"
    bare.write_bytes(pickle.dumps(Malicious(marker)))
    for source in (wrapped, bare):
        with pytest.raises(WeightsRefused, match=r"save model\.state_dict"):
            bring(source, target)
    assert not marker.exists()
    assert not target.exists()


def test_safe_formats_are_copied_and_checked(tmp_path, files):
    save_file({"a": torch.ones(3)}, tmp_path / "a.safetensors")
    for source in [tmp_path / "a.safetensors", files.onnx("cls/x").weights]:
        target = tmp_path / "out" / source.name
        bring(source, target)
        assert target.read_bytes() == source.read_bytes()
        source.write_bytes(source.read_bytes()[:40])
        with pytest.raises(WeightsCorrupt):
            bring(source, target)
        assert len(target.read_bytes()) > 40  # what was there before is there still


def test_misleading_names_and_unwritable_destinations_are_refused(tmp_path):
    source = saved(tmp_path / "x.pt", {"a": torch.ones(1)})
    with pytest.raises(WeightsRefused, match=r"\.safetensors file"):
        bring(source, tmp_path / "x.onnx")
    with pytest.raises(WeightsRefused, match="unknown format"):
        bring(tmp_path / "x.bin", tmp_path / "x.safetensors")
    with pytest.raises(WeightsMissing):
        bring(tmp_path / "none.pt", tmp_path / "x.safetensors")
    save_file({"a": torch.ones(3)}, tmp_path / "a.safetensors")
    with pytest.raises(LoadError):
        bring(tmp_path / "a.safetensors", source / "x.safetensors")
