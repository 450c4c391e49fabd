"""Modules of torch's backends in oneDNN's forms: each is fused, decided and proven once in a process."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import torch

from experts.backends.base import Packable, RefusedModule
from experts.backends.made_once import MadeOnce
from experts.backends.onednn.calibrating import corrected, observed
from experts.backends.onednn.form import FusedModule, OnednnModule, OnednnSkeleton, fused_module, packed_module
from experts.backends.onednn.trial import decided_module
from experts.calibrations import required_ranges
from experts.errors import BackendUnavailable, WeightsMismatch

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable

    from torch import Tensor

    from experts.backends.forms.base import Form, Modules
    from experts.backends.onednn.quantised_weights import Ranges
    from experts.expert import Expert

KEPT = 64  # modules beside those in use: packing alternates between the line's forms


def packed(form: Form, modules: Modules, expert: Expert) -> Packable:
    """One expert's weights. Raises WeightsMismatch where the module is refused, or the expert is not calibrated."""
    weights, decided = modules.weights(expert, form), form.accepted(expert, _decided(*_key(form, modules, expert)))
    ranges = required_ranges(expert, form.name, decided.quantised) if form.needs_calibration else None
    try:
        program = _with_structure(decided.program, modules.unseen_structure(expert))
        return Packable(decided.tensors(weights, ranges), program=program)
    except ValueError as error:
        raise WeightsMismatch(expert.id, f"{error}: choose {form.plain}") from error


def _with_structure(program: bytes, structure: bytes) -> bytes:
    """The program, which experts of equal weights and another computation do not share."""
    if not structure:
        return program
    return json.dumps({**json.loads(program), "structure": structure.decode()}, separators=(",", ":")).encode()


def observed_ranges(form: Form, modules: Modules, expert: Expert, batches: Iterable[Tensor]) -> Ranges:
    """Raises WeightsMismatch without a form of eight bits, and for NaN."""
    key = _key(form, modules, expert)
    plain = form.accepted(expert, _fused(*key[:-1], torch.float32))
    decided = form.accepted(expert, _decided(*key))
    weights, images = modules.weights(expert, form), list(batches)
    try:
        return corrected(decided, plain, weights, observed(plain, weights, images), torch.cat(images))
    except ValueError as error:
        raise WeightsMismatch(expert.id, f"it cannot be calibrated: {error}") from error


def proven(form: Form, modules: Modules, expert: Expert, program: bytes) -> OnednnModule:
    """Module that a program's skeletons run. Raises BackendUnavailable where it was not packed for this box."""
    return _proven(f"{expert.architecture} in {form.name}", *_key(form, modules, expert), program)


def skeleton(form: Form, modules: Modules, expert: Expert, program: bytes, device: str) -> OnednnSkeleton:
    if device != "cpu":
        raise BackendUnavailable(f"{expert.architecture} in {form.name}", f"it runs on the CPU, not on {device}")
    return OnednnSkeleton(proven(form, modules, expert, program), modules.reader(expert))


def _key(form: Form, modules: Modules, expert: Expert) -> tuple[Modules, Hashable, tuple[int, int], torch.dtype]:
    return modules, modules.structure(expert), expert.pixels.size, getattr(torch, form.numbers)


def _fuse(
    modules: Modules, structure: Hashable, size: tuple[int, int], numbers: torch.dtype
) -> FusedModule | RefusedModule:
    return fused_module(modules.module(structure), size, modules.outputs, numbers)


def _decide(
    modules: Modules, structure: Hashable, size: tuple[int, int], numbers: torch.dtype
) -> OnednnModule | RefusedModule:
    found = _fused(modules, structure, size, numbers)
    return decided_module(modules.module(structure), found, modules.outputs, modules.sample(structure))


def _prove(
    subject: str, modules: Modules, structure: Hashable, size: tuple[int, int], numbers: torch.dtype, program: bytes
) -> OnednnModule:
    return packed_module(subject, _fused(modules, structure, size, numbers), program)


_fused, _decided, _proven = MadeOnce(_fuse, KEPT), MadeOnce(_decide, KEPT), MadeOnce(_prove, KEPT)
