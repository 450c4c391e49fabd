"""Where the CUDA runtime library is looked for."""

from __future__ import annotations

import pytest
import torch

from agent.runtime.machine.cuda_runtime import cuda_runtime
from experts.errors import BackendUnavailable


class Loader:
    """Knows some libraries, and remembers what it was asked for."""

    def __init__(self, *known):
        self.known = set(known)
        self.asked = []

    def __call__(self, name):
        self.asked.append(name)
        if name not in self.known:
            raise OSError(f"{name}: cannot open shared object file: No such file or directory")
        return name


@pytest.fixture
def packages(tmp_path):
    """A folder that a wheel of the runtime was installed in."""
    folder = tmp_path / "nvidia" / "cu13" / "lib"
    folder.mkdir(parents=True)
    for name in ("libcudart.so.13", "libcudart_static.a", "libcublas.so.13"):
        (folder / name).touch()
    return tmp_path


def test_the_one_that_torch_was_built_for_comes_first(packages):
    load = Loader("libcudart.so.13", "libcudart.so")
    assert cuda_runtime(load, "13.2", packages) == "libcudart.so.13"
    assert load.asked == ["libcudart.so.13"]


def test_a_wheel_s_folder_is_looked_in(packages):
    wheel = str(packages / "nvidia" / "cu13" / "lib" / "libcudart.so.13")
    assert cuda_runtime(Loader(wheel, "libcudart.so"), "13.2", packages) == wheel


def test_one_inside_torch_is_found_by_its_own_name(tmp_path):
    library = tmp_path / "torch" / "lib" / "libcudart-d0da41ae.so.11.0"
    library.parent.mkdir(parents=True)
    library.touch()
    assert cuda_runtime(Loader(str(library)), "11.8", tmp_path) == str(library)


def test_a_toolkit_s_is_the_last_resort(packages):
    load = Loader("libcudart.so")
    assert cuda_runtime(load, "13.2", packages) == "libcudart.so"
    assert len(load.asked) == 4


def test_where_there_is_none_it_says_what_was_tried_and_what_to_do(packages):
    with pytest.raises(BackendUnavailable, match="install nvidia-cuda-runtime") as refused:
        cuda_runtime(Loader(), "13.2", packages)
    assert "libcudart.so.13 nor as libcudart.so.13.0 nor as" in str(refused.value)
    assert refused.value.what == "cuda"


@pytest.mark.skipif(torch.version.cuda is None, reason="this torch is built without CUDA")
def test_the_installed_torch_s_library_is_found_and_has_the_call():
    assert cuda_runtime().cudaHostGetDevicePointer is not None
