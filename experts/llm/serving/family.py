"""Several models that share weights, in one pass: a step with shared weights runs once for all their tokens.

A pass goes step by step (embedding, each layer's attention and feed-forward part, head). Attention itself has no
weights: it runs over all rows, whose keys and values are in one arena. Adapters are no weights of a step: it runs once
over the tokens of all adapters of its weights, and each adapter's delta is added to its own tokens. Guarantees: a token
is computed by its own model's weights, independent of its neighbours. Weights are the same if their addresses are:
bytes are never compared.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from experts.devices.graphs import graphs_here
from experts.llm.low_rank import AdaptedRows
from experts.llm.model import run_layers
from experts.llm.serving.decode_graphs import hidden_by

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Sequence

    from experts.devices.copies import Upload
    from experts.llm.attention import KeyValues
    from experts.llm.model import LanguageModel, Step
    from experts.llm.token_batch import TokenBatch


_known: WeakKeyDictionary[LanguageModel, tuple[Hashable, ...]] = WeakKeyDictionary()  # by model


class ModelFamily:
    """Models of one shape, dtype and device. ``owners`` below: each row's or token's model, as a place among them."""

    def __init__(self, models: Sequence[LanguageModel]) -> None:
        """Raises ValueError for models that cannot run in one pass."""
        first = models[0]
        if any(_form(model) != _form(first) for model in models):
            raise ValueError("models of different shapes, number formats or devices are no family")
        self.models = tuple(models)
        # by step: for each model the first with the same weights; empty for a single model
        identities = [_identities(model) for model in models] if len(models) > 1 else []
        self._same = [tuple(step.index(each) for each in step) for step in zip(*identities, strict=True)]

    def hidden(self, batch: TokenBatch, key_values: KeyValues, owners: Sequence[int]) -> Tensor:
        """Hidden states behind the last layer; ``owners``: model of each row."""
        if len(set(owners)) == 1:
            model = self.models[owners[0]]
            if (graphs := graphs_here()) is None:
                return model.hidden(batch, key_values)
            with torch.inference_mode():
                return hidden_by(graphs, model, batch, key_values.reserve(batch))
        with torch.inference_mode():
            of_tokens = [owner for owner, row in zip(owners, batch.rows, strict=True) for _ in range(row.count)]
            shares = _Shares(self.models, of_tokens, self._same[:-1], batch.numbers)
            return run_layers(self.models[0], partial(self._run, shares), batch, key_values.reserve(batch))

    def head(self, owners: Sequence[int], numbers: Upload) -> Callable[[Tensor], Tensor]:
        """Hidden states of some tokens to their logits; ``owners``: each token's model.

        Asked for before the pass, so that the tokens' places are uploaded with ``numbers``.
        """
        if len(set(owners)) == 1:
            return self.models[owners[0]].logits
        shares = _Shares(self.models, owners, self._same[-1:], numbers)

        def logits(hidden: Tensor) -> Tensor:
            with torch.inference_mode():
                return self._run(shares, -1, lambda one, own: (one.logits(own),), hidden)[0]

        return logits

    def _run(self, shares: _Shares, part: int, step: Step, *inputs: Tensor) -> tuple[Tensor, ...]:
        """A step over all tokens: once, or for each of its weights over the tokens that are theirs."""
        parts = shares.by(self._same[part])
        if len(parts) == 1:
            return step(parts[0].model, *inputs)
        made = [step(part.model, *(one[part.tokens] for one in inputs)) for part in parts]
        return tuple(
            _joined([part.tokens for part in parts], pieces, len(inputs[0])) for pieces in zip(*made, strict=True)
        )


@dataclass(frozen=True, slots=True)
class _TokenShare:
    """Tokens that a model runs in a step, with the adapter of each."""

    model: LanguageModel
    tokens: Tensor


class _Shares:
    """Division of a batch's tokens among models, for each way in which steps share weights.

    ``sames``: these ways, for each model the first with the same weights. ``numbers``: takes the tokens' places along.
    """

    def __init__(
        self, models: Sequence[LanguageModel], owners: Sequence[int], sames: Sequence[tuple[int, ...]], numbers: Upload
    ) -> None:
        self._models = models
        self._numbers = numbers
        self._owners = np.array(owners)
        self._planned = {same: self._plan(np.array(same)[self._owners]) for same in set(sames)}
        self._divided: dict[tuple[int, ...], list[_TokenShare]] = {}

    def by(self, same: tuple[int, ...]) -> list[_TokenShare]:
        """Shares of a step."""
        if same not in self._divided:
            self._divided[same] = [share() for share in self._planned[same]]
        return self._divided[same]

    def _plan(self, weights: np.ndarray) -> list[Callable[[], _TokenShare]]:
        return [self._plan_share(first, np.flatnonzero(weights == first)) for first in np.unique(weights).tolist()]

    def _plan_share(self, first: int, tokens: np.ndarray) -> Callable[[], _TokenShare]:
        owners, numbers = self._owners[tokens], self._numbers
        placed = numbers.add(torch.from_numpy(tokens))
        adapters = [
            (numbers.add(torch.from_numpy(np.flatnonzero(owners == owner))), own.adapter)
            for owner in np.unique(owners).tolist()
            for own in self._models[owner].adapters
        ]

        def share() -> _TokenShare:
            own = tuple(AdaptedRows(numbers[rows], adapter) for rows, adapter in adapters)
            return _TokenShare(self._models[first].adapted(own), numbers[placed])

        return share


def families(models: Iterable[LanguageModel]) -> list[ModelFamily]:
    """Group models into families: models with at least one step in common run together."""
    found: list[list[LanguageModel]] = []
    for model in models:
        near = next((group for group in found if _has_common(group[0], model)), None)
        if near is None:
            found.append([model])
        else:
            near.append(model)
    return [ModelFamily(group) for group in found]


def identity(part: object) -> Hashable:
    """Key of identical weights: tensors by address, records by their fields, other values by themselves."""
    if isinstance(part, Tensor):
        return part.data_ptr(), part.shape, part.stride(), part.dtype
    if isinstance(part, tuple):
        return tuple(identity(one) for one in part)
    if is_dataclass(part):
        return type(part), *(identity(getattr(part, field.name)) for field in fields(part))
    return part if part is None or isinstance(part, int | float | Enum) else id(part)


def _form(model: LanguageModel) -> tuple[object, ...]:
    return type(model), model.spec, model.dtype, model.device


def _has_common(one: LanguageModel, other: LanguageModel) -> bool:
    if _form(one) != _form(other):
        return False
    return any(a == b for a, b in zip(_identities(one), _identities(other), strict=True))


def _identities(model: LanguageModel) -> tuple[Hashable, ...]:
    """Of a model's parts, computed once: a model's tensors stay where they are."""
    if model not in _known:
        _known[model] = tuple(identity(part) for part in model.parts)
    return _known[model]


def _joined(places: Sequence[Tensor], pieces: Sequence[Tensor], count: int) -> Tensor:
    joined = pieces[0].new_empty((count, *pieces[0].shape[1:]))
    for place, piece in zip(places, pieces, strict=True):
        joined[place] = piece
    return joined
