"""Finds the weights in a saved object: a state dict, one under a key, or a whole module, in any wrapper.

Guarantees: one set is taken, and named where the file has several. Averaged weights take precedence, as trainers
evaluate them. A set is taken whole or refused; the refusal names the entry that is not a tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from experts.checkpoints.names import network_of
from experts.checkpoints.tensors import CheckpointTensor
from experts.checkpoints.unpickler import SAVE_ADVICE, PickledObject
from experts.errors import WeightsRefused

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

AVERAGES = ("ema", "model_ema", "ema_model", "state_dict_ema", "ema_state_dict", "averaged_model")
MODELS = (
    "model", "state_dict", "model_state_dict", "model_state", "module", "net", "network", "net_state_dict", "weights",
)  # fmt: skip
LIGHTNING_VERSION = "pytorch-lightning_version"
EXTRA_STATE = "_extra_state"  # state of a module beside its tensors
DEPTH_MAXIMUM = 4  # of keys; ema.module.state_dict is the deepest known
MODULES_DEEP_MAXIMUM = 100
TENSORS_MAXIMUM = 200_000  # of one set: nested references to the same module multiply the names
KEYS_NAMED, NAME_SHOWN = 8, 80
KEYS_MAXIMUM = 1000  # searched where no key has a usual name
TRAINING = ("optimizer", "optimizer_states", "optimizer_state_dict", "optim", "scaler", "scheduler", "lr_schedulers")


@dataclass(frozen=True, slots=True)
class Selection:
    """Selected set of weights. ``owner``: the object that holds it, a module's record or a dictionary.

    ``of_loss``: names of buffers of the loss, which are left out. ``prefix``: before every name, left out, too.
    """

    weights: Mapping[str, CheckpointTensor]
    where: str
    owner: object
    remarks: tuple[str, ...]
    of_loss: tuple[str, ...] = ()
    prefix: str = ""


def select(source: str, document: object) -> Selection:
    """Weights of a saved object. Raises WeightsRefused, which names the content found instead."""
    search = _WeightsSearch(source)
    candidates = list(search.candidates(document, (), 0))
    if not candidates:
        raise search.refused or WeightsRefused(source, f"holds no weights: {_described(document)}: {SAVE_ADVICE}")
    taken, *others = candidates
    remarks = [f"the weights under {taken.where} were taken"] if taken.where else []
    if others:
        remarks.append(f"{', '.join(other.where for other in others)} has weights, too: left out")
    weights = dict(taken.weights)
    if taken.where.rpartition(".")[2] in AVERAGES and others and set(weights) < set(others[0].weights):
        remarks.append(f"what {taken.where} lacks was taken from {others[0].where}")
        weights = {**others[0].weights, **weights}
    network = network_of(source, weights, anyone=isinstance(document, dict) and LIGHTNING_VERSION in document)
    remarks += network.remarks
    return Selection(
        network.weights, taken.where or "the file itself", taken.owner, tuple(remarks), network.of_loss, network.prefix
    )


class _WeightsSearch:
    """Search for sets of weights, best first. ``refused``: the first error of a rejected set."""

    def __init__(self, source: str) -> None:
        self._source = source
        self.refused: WeightsRefused | None = None

    def candidates(self, value: object, path: tuple[str, ...], depth: int) -> Iterator[Selection]:
        if isinstance(value, PickledObject):
            yield from self._of_record(value, path, depth)
        elif isinstance(value, dict) and depth < DEPTH_MAXIMUM:
            yield from self._of_dictionary(value, path, depth)

    def _of_dictionary(self, value: dict[object, object], path: tuple[str, ...], depth: int) -> Iterator[Selection]:
        found = [
            one for key in (*AVERAGES, *MODELS) for one in self.candidates(value.get(key), (*path, key), depth + 1)
        ]
        if not found and any(map(_is_tensor, value.values())):
            flat = self._attempted(lambda: _flat(self._source, value, path))
            found = [Selection(flat, ".".join(path), value, ())] if flat else []
        if not found and not path:
            found = self._under_another_key(value)
        yield from found

    def _under_another_key(self, value: dict[object, object]) -> list[Selection]:
        """Weights under an unusual key, if exactly one key has weights."""
        keys = [key for key in value if isinstance(key, str) and key not in (*AVERAGES, *MODELS, *TRAINING)]
        found = [one for key in keys[:KEYS_MAXIMUM] for one in self.candidates(value[key], (key,), DEPTH_MAXIMUM - 1)]
        if len(found) > 1:
            names = ", ".join(one.where for one in found[:KEYS_NAMED])
            self.refused = WeightsRefused(self._source, f"has weights under {names}, not under one: {SAVE_ADVICE}")
            return []
        return found

    def _of_record(self, record: PickledObject, path: tuple[str, ...], depth: int) -> Iterator[Selection]:
        if isinstance(record.attribute("_modules"), dict) or isinstance(record.attribute("_parameters"), dict):
            if weights := self._attempted(lambda: _walk(self._source, record, "", {}, 0)):
                yield Selection(weights, ".".join(path), record, ())
        elif record.entries:  # a subclass of dict
            yield from self.candidates(record.entries, path, depth + 1)
        elif isinstance(record.state, dict):  # an object around a model, such as AveragedModel
            yield from self.candidates(record.state, path, depth + 1)

    def _attempted(self, find: Callable[[], dict[str, CheckpointTensor]]) -> dict[str, CheckpointTensor]:
        try:
            return find()
        except WeightsRefused as error:
            self.refused = self.refused or error
            return {}


def _is_tensor(value: object) -> bool:
    """Unsupported tensors, such as sparse ones, count as tensors."""
    rebuilt = isinstance(value, PickledObject) and value.kind.module == "torch._utils"
    return rebuilt or isinstance(value, CheckpointTensor)


def _flat(source: str, entries: Mapping[object, object], path: tuple[str, ...]) -> dict[str, CheckpointTensor]:
    flat: dict[str, CheckpointTensor] = {}
    for name, value in entries.items():
        if isinstance(name, str) and isinstance(value, CheckpointTensor):
            flat[name] = value
        elif not (isinstance(name, str) and name.endswith(EXTRA_STATE)):
            where = f" of {'.'.join(path)}" if path else ""
            entry = f"entry {str(name)[:NAME_SHOWN]!r}{where}"
            raise WeightsRefused(source, f"holds more than tensors ({entry} is {_kind(value)}): {SAVE_ADVICE}")
    return _bounded(source, flat)


def _walk(
    source: str, module: PickledObject, prefix: str, weights: dict[str, CheckpointTensor], depth: int
) -> dict[str, CheckpointTensor]:
    """Parameters and persistent buffers of a module and its submodules, by their names in a state dict."""
    if depth > MODULES_DEEP_MAXIMUM:
        raise WeightsRefused(source, f"has modules in one another over {MODULES_DEEP_MAXIMUM} deep: {SAVE_ADVICE}")
    passing = module.attribute("_non_persistent_buffers_set")
    left_out = passing if isinstance(passing, set | frozenset) else ()
    for kind in ("_parameters", "_buffers"):
        for name, value in _named(module.attribute(kind)):
            if value is None or (kind == "_buffers" and name in left_out):
                continue
            if not isinstance(value, CheckpointTensor):
                refusal = f"its {prefix}{name[:NAME_SHOWN]} is {_kind(value)}, not a tensor"
                raise WeightsRefused(source, f"{refusal}: {SAVE_ADVICE}")
            weights[prefix + name] = value
    _bounded(source, weights)
    for name, value in _named(module.attribute("_modules")):
        if isinstance(value, PickledObject):
            _walk(source, value, f"{prefix}{name}.", weights, depth + 1)
    return weights


def _named(held: object) -> Iterator[tuple[str, object]]:
    entries = held.items() if isinstance(held, dict) else ()
    return ((name, value) for name, value in entries if isinstance(name, str))


def _bounded(source: str, weights: dict[str, CheckpointTensor]) -> dict[str, CheckpointTensor]:
    if len(weights) > TENSORS_MAXIMUM:
        raise WeightsRefused(source, f"has over {TENSORS_MAXIMUM} tensors: no expert has")
    return weights


def _kind(value: object) -> str:
    if isinstance(value, PickledObject):
        return f"a {str(value.kind)[:NAME_SHOWN]}"
    return "nothing" if value is None else f"a {type(value).__name__}"


def _described(document: object) -> str:
    if isinstance(document, dict):
        keys = [str(key)[:40] for key in document]
        return f"a dictionary of {', '.join(keys[:KEYS_NAMED]) or 'nothing'}{', ...' if len(keys) > KEYS_NAMED else ''}"
    return f"{_kind(document)} instead of a state dict"
