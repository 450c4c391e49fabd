"""GPUs of these tests have memories too small for what cuBLAS keeps."""

from dataclasses import replace

import pytest

from experts.backends.capabilities import cuda_capabilities, supposed


@pytest.fixture(autouse=True)
def without_libraries():
    with supposed({"cuda": replace(cuda_capabilities((8, 6)), products_bytes=0)}):
        yield
