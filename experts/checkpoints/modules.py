"""Layers of a module: class and settings of each, by path. Layers without weights decide as much as those with some.

The same settings are read from a pickled module, as data, and from a built one, so that both can be compared.
"""

from __future__ import annotations

from itertools import islice
from types import BuiltinFunctionType, FunctionType
from typing import TYPE_CHECKING, Any, TypeAlias

from experts.checkpoints.unpickler import PickledName, PickledObject

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch.nn import Module

Setting: TypeAlias = "bool | int | float | str | list[Setting] | None"
Layer: TypeAlias = "dict[str, Setting]"

LAYERS_MAXIMUM, VALUES_MAXIMUM, TEXT_MAXIMUM = 5_000, 64, 200
COMPILED = "_orig_mod"  # attribute of torch's OptimizedModule
CLASS, CHANGES = "its class", "its hooks and forwards of its own"  # beside the names of settings
HOOKS = ("_forward_hooks", "_forward_pre_hooks")
WRAPPERS = frozenset({
    "DataParallel", "DistributedDataParallel", "OptimizedModule", "AveragedModel", "ModelEma", "ModelEmaV2",
    "ModelEmaV3",
})  # fmt: skip
NO_SETTINGS = frozenset({  # for training or exports, counts that shapes show, and records of how a model was made
    "training", "inplace", "p", "momentum", "drop_rate", "drop_prob", "init_weights", "aux_logits", "memory_efficient",
    "num_classes", "nc", "export", "format", "dynamic", "shape", "max_det", "xyxy", "agnostic_nms", "end2end", "task",
    "pt_path", "yaml_file", "type", "np", "requires_grad", "grad_checkpointing",
})  # fmt: skip


def recorded_layers(model: PickledObject, prefix: str) -> tuple[dict[str, Layer], str | None]:
    """Layers below ``prefix`` of a pickled module, and the class of a wrapper around them whose code is not known."""
    unknown: str | None = None
    for name in prefix.split(".")[:-1]:
        model = model if name == COMPILED else _compiled(model)
        if model.kind.module.partition(".")[0] not in {"torch", "timm"} or model.kind.name not in WRAPPERS:
            unknown = unknown or str(model.kind)
        below = dict(_children(model)).get(name)
        if below is None:
            return {}, unknown
        model = below
    found: dict[str, Layer] = {}
    waiting = [("", _compiled(model))]
    while waiting and len(found) < LAYERS_MAXIMUM:
        path, layer = waiting.pop()
        found[path] = _recorded(layer)
        waiting += [(f"{path}.{name}" if path else name, child) for name, child in reversed([*_children(layer)])]
    return found, unknown


def built_layers(model: Module) -> dict[str, Layer]:
    """Layers of a built module, as a pickle records them."""
    named = model.named_modules(remove_duplicate=False)
    return {name: {**_settings(vars(one)), CLASS: f"torch.{type(one).__name__}", CHANGES: 0} for name, one in named}


def _settings(values: Mapping[Any, object]) -> Layer:
    """Public settings among a module's attributes."""
    return {
        name: _setting(value)
        for name, value in values.items()
        if isinstance(name, str) and not name.startswith("_") and name not in NO_SETTINGS and _is_setting(value)
    }


def _recorded(layer: PickledObject) -> Layer:
    state = layer.state if isinstance(layer.state, dict) else {}
    hooks = (state.get(key) for key in HOOKS)
    changes = sum(len(each) for each in hooks if isinstance(each, dict)) + ("forward" in state)
    settings = dict(islice(_settings(state).items(), VALUES_MAXIMUM))
    return {**settings, CLASS: str(layer.kind)[:TEXT_MAXIMUM], CHANGES: changes}


def _children(layer: PickledObject) -> Iterator[tuple[str, PickledObject]]:
    modules = layer.attribute("_modules")
    for name, child in modules.items() if isinstance(modules, dict) else ():
        if isinstance(name, str) and isinstance(child, PickledObject):
            yield name, child if name == COMPILED else _compiled(child)


def _compiled(layer: PickledObject) -> PickledObject:
    """The layer that torch.compile wrapped."""
    modules = layer.attribute("_modules") if layer.kind.name == "OptimizedModule" else None
    inner = modules.get(COMPILED) if isinstance(modules, dict) else None
    return inner if isinstance(inner, PickledObject) else layer


def _is_setting(value: object) -> bool:
    if isinstance(value, list | tuple):
        return len(value) <= VALUES_MAXIMUM and all(map(_is_setting, value))
    if isinstance(value, str):
        return len(value) <= TEXT_MAXIMUM
    return value is None or isinstance(value, bool | int | float | type | FunctionType | BuiltinFunctionType)


def _setting(value: object) -> Setting:
    if isinstance(value, list | tuple):
        return [_setting(each) for each in value]
    if isinstance(value, PickledName):
        return value.name
    if isinstance(value, type | FunctionType | BuiltinFunctionType):
        return value.__name__
    return value if isinstance(value, bool | int | float | str) else None
