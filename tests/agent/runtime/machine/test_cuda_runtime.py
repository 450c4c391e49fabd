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


def test_where_there_is_none_it_says_what_was_tried_and_what_to_do(packages):
    with pytest.raises(BackendUnavailable, match="install nvidia-cuda-runtime") as refused:
        cuda_runtime(Loader(), "13.2", packages)
    assert "libcudart.so.13 nor as libcudart.so.13.0 nor as" in str(refused.value)
    assert refused.value.what == "cuda"


@pytest.mark.skipif(torch.version.cuda is None, reason="this torch is built without CUDA")
def test_the_installed_torch_s_library_is_found_and_has_the_call():
    assert cuda_runtime().cudaHostGetDevicePointer is not None
