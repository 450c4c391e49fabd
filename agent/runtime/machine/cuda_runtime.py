"""CUDA runtime library of torch, for calls that torch's own binding lacks.

By the versioned name the loader returns the library that this process has loaded; folders of wheels come after it.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from experts.errors import BackendUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable

NAME = "libcudart.so"
WHEEL_FOLDERS = ("nvidia/*/lib", "torch/lib")  # of nvidia-cuda-runtime (cu13, cuda_runtime), of torch with it inside


def cuda_runtime(
    load: Callable[[str], ctypes.CDLL] = ctypes.CDLL,
    version: str | None = torch.version.cuda,
    packages: Path = Path(torch.__file__).parents[2],
) -> ctypes.CDLL:
    """``version``: of CUDA that torch was built for; ``packages``: folder that torch is installed in.

    Raises BackendUnavailable with the names that were tried.
    """
    tried = library_names(version, packages)
    for name in tried:
        try:
            return load(name)
        except OSError:
            continue
    raise BackendUnavailable(
        "cuda",
        f"the CUDA runtime of torch for CUDA {version} is not found, neither as {' nor as '.join(tried)}: install "
        "nvidia-cuda-runtime beside torch, or set device: cpu",
    )


def library_names(version: str | None, packages: Path) -> tuple[str, ...]:
    """Possible names of the library, best first."""
    major = None if version is None else version.partition(".")[0]
    versioned = () if major is None else (f"{NAME}.{major}", f"{NAME}.{major}.0")  # the latter up to CUDA 11
    in_wheels = [str(path) for folder in WHEEL_FOLDERS for path in sorted(packages.glob(f"{folder}/libcudart*.so*"))]
    return (*versioned, *in_wheels, NAME)
