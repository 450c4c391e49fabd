"""torch's compiler: left out where modules run on meta, and whole for anything else that asks for it.

Each test begins in a process without it.
"""

import pytest

BEGUN = """
import sys
import torch
from experts.backends.modules.compiler import compiler_left_out

def add():
    return torch.empty(2, device="meta") + torch.empty(2, device="meta")

def loaded():
    return sorted({"torch._dynamo", "torch._dynamo.utils", "triton"} & set(sys.modules))

assert not loaded(), loaded()
"""
COMPILES = """
assert torch.compile(lambda x: torch.cos(x) + 1, backend="eager", fullgraph=True)(torch.zeros(2)).tolist() == [2, 2]
assert torch._dynamo is sys.modules["torch._dynamo"] and torch._dynamo.__file__
assert torch._dynamo.utils is sys.modules["torch._dynamo.utils"] and torch._dynamo.utils.__file__
assert not [finder for finder in sys.meta_path if str(getattr(finder, "__module__", "")).startswith("experts.")]
"""
PACKED = """
from pathlib import Path
from safetensors.torch import save_file
from experts.backends import backend_for
from experts.backends.vision.{module} import build_trainable
from experts.expert import Expert, InputSpec, Precision

save_file(build_trainable("{architecture}", 2).state_dict(), "random.safetensors")
expert = Expert("e", "{architecture}", Path("random.safetensors"), ("ok", "bad"), InputSpec(64, 64, "unit"))
backend = backend_for(expert.architecture)
backend.pack(expert, Precision.FP32)
assert backend.workspace_bytes(expert, Precision.FP32, 2) > 0
backend.skeleton(expert, Precision.FP32, b"", "cpu")
assert not loaded(), loaded()
"""


@pytest.fixture
def run(forks, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def run(*code):
        done = forks.run("".join((BEGUN, *code)))
        assert done.returncode == 0, done.stderr[-3000:]

    return run


def test_operators_on_meta_load_no_compiler_and_leave_no_trace_in_it(run):
    run(
        "with compiler_left_out():\n    with compiler_left_out():\n        add()\n    add()\nassert not loaded()\n",
        COMPILES,
        "assert add().device.type == 'meta'",
    )


@pytest.mark.parametrize(
    "asking",
    [
        "import torch._dynamo; torch._dynamo.config.verbose",
        "from torch import _dynamo; _dynamo.config.verbose",
        "from torch._dynamo.testing import CompileCounter",
        "from torch._dynamo.utils import counters",
        "from torch._dynamo.utils import is_compile_supported as supported; assert supported('cpu')",
        "torch.compiler.disable(add)()",
    ],
)
def test_any_other_use_of_the_compiler_loads_the_real_one(asking, run):
    run(f"with compiler_left_out():\n    add()\n    {asking}\n    add()\n", COMPILES)


@pytest.mark.parametrize(
    ("module", "architecture"), [("classifier", "resnet18"), ("classifier", "convnext_tiny"), ("detector", "yolov5n")]
)
def test_expert_is_packed_and_made_runnable_without_the_compiler(module, architecture, run):
    run(PACKED.format(module=module, architecture=architecture))
