"""One network among a file's tensors, by their names.

Names lose what wrappers put into them. Tensors of losses, metrics and counters are left out, whose names say so. Of two
equal networks, as an average beside its model, the average is taken, as trainers evaluate it; others are refused.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from experts.errors import WeightsRefused

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

Tensor = TypeVar("Tensor")

PARALLEL, COMPILED = "module.", "_orig_mod."
WRAPPERS = (  # all but the first two are attributes of trainers' classes
    PARALLEL, COMPILED, "model.", "net.", "network.", "backbone.", "timm_model.",
)  # fmt: skip
INSIDE = re.compile(r"(?:^|(?<=\.))(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|_forward_module)\.")
POSITIVE_WEIGHT = "pos_weight"  # a buffer of torch's BCEWithLogitsLoss
OF_LOSSES = re.compile(
    r"(\w+_)?(criterion|loss(es)?|loss_?f(n|unc(tion)?)|cross_?entropy|bce|pos_weight|class_weights?)"
)
OF_METRICS = re.compile(
    r"((train|val|valid|validation|test)_?)?"
    r"(metrics?|acc(uracy)?|f1|auroc|auc|iou|kappa|precision|recall|conf(usion)?_?mat(rix)?|cm)(_\w+)?"
)
COUNTERS = frozenset({"n_averaged", "num_updates", "initted", "step", "decay"})  # of averages
AVERAGE = re.compile(r"ema|averag|swa|shadow", re.IGNORECASE)
NAMES_SHOWN = 3
NETWORK_MINIMUM = 8  # tensors: fewer are a layer


@dataclass(frozen=True, slots=True)
class Network(Generic[Tensor]):
    """``prefix``: left out before every name. ``of_loss``: buffers of a binary cross entropy, left out."""

    weights: dict[str, Tensor]
    prefix: str
    of_loss: tuple[str, ...]
    remarks: tuple[str, ...]


def network_of(source: str, weights: Mapping[str, Tensor], *, anyone: bool) -> Network[Tensor]:
    """``anyone``: any attribute name may be a prefix, as in a LightningModule; else only the usual ones.

    Raises WeightsRefused for several networks of which none, or more than one, is called an average.
    """
    remarks: list[str] = []
    kept = {name: one for name, one in weights.items() if name.rpartition(".")[2] not in COUNTERS}
    for pattern, what in ((OF_LOSSES, "a loss"), (OF_METRICS, "a metric")):
        left_out = [name for name in kept if any(map(pattern.fullmatch, name.split(".")))]
        if left_out and len(left_out) < len(kept):
            remarks.append(f"{_listed(left_out)} is of {what}: left out")
            kept = {name: tensor for name, tensor in kept.items() if name not in left_out}
    kept, before = _one_network(source, kept, remarks)
    kept, prefix = _unwrapped(kept, anyone=anyone)
    if before + prefix:
        remarks.append(f"{before + prefix} before every name was left out")
    plain = {INSIDE.sub("", name): tensor for name, tensor in kept.items()}
    if len(plain) == len(kept) and plain.keys() != kept.keys():
        remarks.append("wrappers inside names were left out")
        kept = plain
    of_loss = tuple(name for name in weights if name.rpartition(".")[2] == POSITIVE_WEIGHT)
    return Network(kept, before + prefix, of_loss, tuple(remarks))


def _one_network(source: str, weights: dict[str, Tensor], remarks: list[str]) -> tuple[dict[str, Tensor], str]:
    """The average among equal networks below several attributes, and the prefix of its names."""
    groups: defaultdict[str, dict[str, Tensor]] = defaultdict(dict)
    for name, tensor in weights.items():
        first, _, rest = name.partition(".")
        groups[first][rest] = tensor
    if len(groups) < 2 or min(map(len, groups.values())) < NETWORK_MINIMUM:
        return weights, ""
    if len({_outline(_unwrapped(each, anyone=True)[0]) for each in groups.values()}) > 1:
        return weights, ""
    averages = [name for name in groups if AVERAGE.search(name)]
    if len(averages) != 1:
        raise WeightsRefused(
            source, f"has networks of the same layers under {', '.join(groups)}: save the state_dict() of one alone"
        )
    others = ", ".join(name for name in groups if name != averages[0])
    remarks.append(f"the average {averages[0]} was taken, as trainers evaluate it; {others} has weights, too: left out")
    return groups[averages[0]], f"{averages[0]}."


def _outline(weights: Mapping[str, Any]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return tuple(sorted((INSIDE.sub("", name), tuple(tensor.shape)) for name, tensor in weights.items()))


def _unwrapped(weights: dict[str, Tensor], *, anyone: bool) -> tuple[dict[str, Tensor], str]:
    """Weights without the prefix common to all names, and that prefix."""
    removed = ""
    names = list(weights)
    while prefix := _common(names, anyone=anyone):
        names = [name.removeprefix(prefix) for name in names]
        removed += prefix
    return dict(zip(names, weights.values(), strict=True)), removed


def _common(names: list[str], *, anyone: bool) -> str:
    first, dot, rest = names[0].partition(".") if names else ("", "", "")
    prefix = first + dot
    known = prefix in WRAPPERS or (anyone and not first.isdigit())
    if not rest or not known or not all(name.startswith(prefix) for name in names):
        return ""
    by_number = all(name.removeprefix(prefix).partition(".")[0].isdigit() for name in names)
    if by_number and prefix not in {PARALLEL, COMPILED}:  # numbered layers: the prefix belongs to the model
        return ""
    return prefix


def _listed(names: Iterable[str]) -> str:
    shown = list(names)
    return ", ".join(shown[:NAMES_SHOWN]) + (", ..." if len(shown) > NAMES_SHOWN else "")
