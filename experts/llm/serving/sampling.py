"""Sampling of tokens from logits: each row by its own Sampling, all rows at once if that saves time.

Guarantees: a draw depends on the request's logits, tokens and seed, on no neighbour. A row with NaN or infinity is
reported and draws nothing. A grammar comes first, then penalties, temperature, top-k, top-p over the rest of top-k, and
min-p. Logprobs are those of the model's own distribution, before all of these.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import torch

from experts.llm.serving.generation import Token

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

    from experts.llm.serving.generation import Sampling
    from experts.llm.serving.grammar import Grammar

FIRST_CANDIDATES = 64  # likeliest tokens that top-p tries first,
MORE_CANDIDATES = 1024  # and then, before it sorts the whole vocabulary
FIRST_SEEN = 64


class Sampler:
    """Sampler of one request: its Sampling, its generator, and the tokens it has read and written."""

    def __init__(self, sampling: Sampling, prompt: Iterable[int], grammar: Grammar | None = None) -> None:
        self.sampling = sampling
        self._random = random.Random(sampling.seed)
        self._seen = SeenTokens(prompt) if sampling.has_penalties else None
        self.grammar = None if grammar is None else grammar.begin()

    def draw(self) -> float:
        return self._random.random()

    def wrote(self, token: int) -> None:
        if self._seen is not None:
            self._seen.wrote(token)
        if self.grammar is not None:
            self.grammar.wrote(token)

    @property
    def changes_logits(self) -> bool:
        return self.sampling.has_penalties or self.grammar is not None

    def restrict(self, logits: Tensor) -> None:
        """Leave only the grammar's tokens in a row of logits, in place; all of them after its fault."""
        banned = None if self.grammar is None else self.grammar.banned()
        if banned is None:
            return
        known = logits[: len(banned)]
        known.masked_fill_(torch.from_numpy(banned[: len(known)]).to(logits.device), -torch.inf)
        logits[len(banned) :] = -torch.inf  # the model's vocabulary may be padded

    def penalise(self, logits: Tensor) -> None:
        """Apply the penalties for read and written tokens to a row of logits, in place."""
        if self._seen is None:
            return
        sampling, tokens, counts = self.sampling, *self._seen.on(logits.device)
        own = logits[tokens]
        if sampling.repetition_penalty != 1:
            own = torch.where(own > 0, own / sampling.repetition_penalty, own * sampling.repetition_penalty)
        own = own - sampling.presence_penalty * (counts > 0) - sampling.frequency_penalty * counts
        logits[tokens] = own


class SeenTokens:
    """Distinct tokens of a text, with the count of writes of each. Adding a token does not scan the others."""

    def __init__(self, prompt: Iterable[int]) -> None:
        self._places = {token: place for place, token in enumerate(dict.fromkeys(prompt))}
        room = max(FIRST_SEEN, 2 * len(self._places))
        self._tokens = torch.zeros(room, dtype=torch.int64)
        self._tokens[: len(self._places)] = torch.tensor(list(self._places), dtype=torch.int64)
        self._counts = torch.zeros(room)

    def wrote(self, token: int) -> None:
        place = self._places.setdefault(token, len(self._places))
        if place == len(self._tokens):
            self._tokens = torch.cat((self._tokens, torch.zeros_like(self._tokens)))
            self._counts = torch.cat((self._counts, torch.zeros_like(self._counts)))
        self._tokens[place] = token
        self._counts[place] += 1

    def on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Tokens, and their counts."""
        seen = slice(len(self._places))
        return self._tokens[seen].to(device), self._counts[seen].to(device)


def sample(logits: Tensor, samplers: Sequence[Sampler]) -> list[Token | None]:
    """The next token of each row, (rows, vocabulary); None where a row's logits are not finite."""
    with torch.inference_mode():
        raw = logits.float()
        highest, likeliest = raw.max(dim=-1)
        sound = highest.isfinite().tolist()
        tokens = _tokens(raw, likeliest, sound, samplers)
        wanted = [sampler.sampling.logprobs for sampler in samplers]
        logprobs, alternatives = logprobs_of(raw, tokens, wanted)
    drawn = zip(tokens.tolist(), logprobs, alternatives, sound, strict=True)
    return [Token(token, logprob, others) if is_sound else None for token, logprob, others, is_sound in drawn]


def _tokens(raw: Tensor, likeliest: Tensor, sound: Sequence[bool], samplers: Sequence[Sampler]) -> Tensor:
    logits, tokens = raw, likeliest
    if any(sampler.changes_logits for sampler in samplers):
        logits = raw.clone()
        for row, sampler in zip(logits, samplers, strict=True):
            sampler.restrict(row)
            sampler.penalise(row)
        tokens = logits.argmax(dim=-1)
    drawing = [n for n, sampler in enumerate(samplers) if sound[n] and not sampler.sampling.is_greedy]
    by_kind: dict[tuple[int, bool], list[int]] = {}
    for n in drawing:
        by_kind.setdefault((samplers[n].sampling.top_k, samplers[n].sampling.top_p < 1), []).append(n)
    for (top_k, has_top_p), chosen in by_kind.items():
        tokens[chosen] = _Draw(logits[chosen], [samplers[n] for n in chosen]).tokens(top_k, has_top_p=has_top_p)
    return tokens


class _Draw:
    """Draw of a token for each row from those that its Sampling leaves."""

    def __init__(self, logits: Tensor, samplers: Sequence[Sampler]) -> None:
        self._logits = logits
        self._temperature = _column([sampler.sampling.temperature for sampler in samplers], logits)
        self._top_p = _column([sampler.sampling.top_p for sampler in samplers], logits)
        self._min_p = _column([sampler.sampling.min_p for sampler in samplers], logits)
        draws = [[sampler.draw()] for sampler in samplers]
        self._draws = torch.tensor(draws, dtype=torch.float64, device=logits.device)

    def tokens(self, top_k: int, *, has_top_p: bool) -> Tensor:
        if not top_k:
            shares = self._shares(self._logits)
            return self._within_top_p(shares) if has_top_p else _inverted(_above(shares, self._min_p), self._draws)
        likeliest = self._logits.topk(min(top_k, self._logits.shape[-1]), dim=-1)
        shares = self._shares(likeliest.values)
        return self._chosen(shares, likeliest.indices, slice(None), is_whole=False)

    def _shares(self, logits: Tensor) -> Tensor:
        return ((logits - logits.amax(dim=-1, keepdim=True)) / self._temperature).softmax(dim=-1)

    def _within_top_p(self, shares: Tensor) -> Tensor:
        """Draw from the fewest of the likeliest tokens that hold the rows' top-p."""
        tokens = torch.zeros(len(shares), dtype=torch.int64, device=shares.device)
        rows = list(range(len(shares)))
        for candidates in (FIRST_CANDIDATES, MORE_CANDIDATES, shares.shape[-1]):
            own = shares if len(rows) == len(shares) else shares[rows]
            if candidates < shares.shape[-1]:
                ordered = own.topk(candidates, dim=-1)
            else:
                ordered = own.sort(dim=-1, descending=True, stable=True)
            tokens[rows] = self._chosen(ordered.values, ordered.indices, rows)
            held = ordered.values.sum(dim=-1).tolist()
            rows = [row for row, mass in zip(rows, held, strict=True) if mass < self._top_p[row]]
            if not rows or candidates >= shares.shape[-1]:
                break
        return tokens

    def _chosen(self, shares: Tensor, indices: Tensor, rows: slice | list[int], *, is_whole: bool = True) -> Tensor:
        nucleus = _nucleus(shares, self._top_p[rows], is_whole=is_whole)
        places = _inverted(_above(nucleus, self._min_p[rows]), self._draws[rows])
        return indices.gather(1, places[:, None]).squeeze(1)


def _nucleus(shares: Tensor, top_p: Tensor, *, is_whole: bool) -> Tensor:
    """Zero the shares beyond top-p (arXiv 1904.09751, section 3.1). ``is_whole``: shares of the whole vocabulary."""
    sums = shares.double().cumsum(dim=-1)
    return shares * (sums - shares < (top_p if is_whole else top_p * sums[:, -1:]))


def _above(shares: Tensor, min_p: Tensor) -> Tensor:
    return shares * (shares >= min_p * shares.amax(dim=-1, keepdim=True))


def _inverted(shares: Tensor, draws: Tensor) -> Tensor:
    """Places of the draws in the rows' cumulative shares, which need not sum to 1. A share of 0 is never drawn."""
    sums = shares.double().cumsum(dim=-1)
    places = torch.searchsorted(sums, draws * sums[:, -1:], right=True).squeeze(1)
    last = (shares > 0).long().cumsum(dim=-1).argmax(dim=-1)  # a draw may round up to the sum itself
    return torch.minimum(places, last)


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=like.device)[:, None]


def logprobs_of(
    raw: Tensor, tokens: Tensor, wanted: Sequence[int | None]
) -> tuple[Sequence[float], Sequence[tuple[Token, ...]]]:
    """Logprob of each row's token, and as many alternatives as ``wanted``; 0 and none for rows that want None."""
    if all(count is None for count in wanted):
        return [0.0] * len(wanted), [()] * len(wanted)
    normaliser = raw.logsumexp(dim=-1)
    logprobs = (raw.gather(1, tokens.to(raw.device)[:, None]).squeeze(1) - normaliser).tolist()
    shown = [0.0 if count is None else logprob for logprob, count in zip(logprobs, wanted, strict=True)]
    return shown, _alternatives(raw, normaliser, [count or 0 for count in wanted])


def _alternatives(raw: Tensor, normaliser: Tensor, wanted: Sequence[int]) -> list[tuple[Token, ...]]:
    likeliest = (raw - normaliser[:, None]).topk(min(max(wanted), raw.shape[-1]), dim=-1)
    rows = zip(likeliest.indices.tolist(), likeliest.values.tolist(), wanted, strict=True)
    return [tuple(map(Token, tokens[:count], logprobs[:count])) for tokens, logprobs, count in rows]
