"""A tiny model of Llama's family, of which files are written."""

import pytest

from tests.experts.llm.gguf.writing import tiny_model


@pytest.fixture(scope="session")
def llama():
    return tiny_model("llama")
