"""A CUDA device of fake tensors: they know shapes, number formats and devices, and have no numbers.

An operation that mixes devices, or that asks the device for a number, raises. So does each copy between host and device
except those of ``experts.devices.copies``, which are counted; results that come down are made up.
"""

from contextlib import contextmanager

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from experts.devices import copies as device_copies
from experts.llm import dispatch
from experts.llm.model import LanguageModel
from experts.llm.quant import Int4Tensors, Int8Tensors

CUDA = torch.device("cuda", 0)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FORMS = {
    **{str(dtype): lambda tensors, dtype=dtype: {name: one.to(dtype) for name, one in tensors.items()}
       for dtype in DTYPES},
    "int8": Int8Tensors,
    "int4": Int4Tensors,
}  # fmt: skip


class Synchronised(Exception):
    """A copy between host and device that waits."""


class _Watch(TorchDispatchMode):
    """Raises Synchronised where tensors of both devices meet: in a copy, or as an index.

    Pointwise operations have a single number of the host as their kernel's argument.
    """

    def __init__(self):
        super().__init__()
        self.is_allowed = False

    def __torch_dispatch__(self, operation, types, arguments=(), options=None):
        made = operation(*arguments, **(options or {}))
        tensors = [one for one in tree_leaves((arguments, options, made)) if isinstance(one, torch.Tensor)]
        kinds = {one.device.type for one in tensors}
        if len(kinds) > 1 and not self.is_allowed and torch.Tag.pointwise not in operation.tags:
            raise Synchronised(f"{operation} with {[(one.device.type, tuple(one.shape)) for one in tensors]}")
        return made


class FakeDevice:
    """Counts of copies, ``up`` and ``down``. ``token``: every whole number that comes down."""

    def __init__(self, monkeypatch, token=7):
        self.up = self.down = 0
        self._token = token
        self._mode, self._watch = FakeTensorMode(allow_non_fake_inputs=True), _Watch()
        self._copied_up = device_copies.copied_up
        monkeypatch.setattr(device_copies, "copied_up", self._up)
        monkeypatch.setattr(device_copies, "copied_down", self._down)
        monkeypatch.setattr(dispatch, "capability_of", lambda of: (8, 6))

    def model(self, spec, tensors):
        """The model with its tensors on the device. That waits, once."""
        with self._mode:
            return LanguageModel(spec, there(tensors))

    @contextmanager
    def watched(self):
        with self._mode, self._watch:
            yield

    def _up(self, parts, device):
        self.up, self._watch.is_allowed = self.up + 1, True
        try:
            return self._copied_up(parts, device)
        finally:
            self._watch.is_allowed = False

    def _down(self, parts, device):
        assert {one.device.type for one in parts} <= {"cuda"}
        self.down += 1
        return [made_up(one, self._token) for one in parts]


def made_up(tensor, token):
    kinds = {torch.bool: np.bool_, torch.int64: np.int64}
    value = {torch.bool: True, torch.int64: token}.get(tensor.dtype, -1.0)
    return np.full(tuple(tensor.shape), value, kinds.get(tensor.dtype, np.float64))


def there(tensors):
    """Fake tensors in the shapes of these; to be called in the mode."""
    return {name: torch.empty(one.shape, dtype=one.dtype, device=CUDA) for name, one in tensors.items()}
