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

FIRST_CANDIDATES = 1024  # likeliest tokens that top-p tries before it sorts the whole vocabulary
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
        normaliser = raw.logsumexp(dim=-1)
        tokens = _tokens(raw, normaliser.isfinite().tolist(), samplers)
        logprobs = (raw.gather(1, tokens[:, None]).squeeze(1) - normaliser).tolist()
        alternatives = _alternatives(raw, normaliser, samplers)
    sound = normaliser.isfinite().tolist()
    drawn = zip(tokens.tolist(), logprobs, alternatives, sound, strict=True)
    return [Token(token, logprob, others) if is_sound else None for token, logprob, others, is_sound in drawn]


def _tokens(raw: Tensor, sound: Sequence[bool], samplers: Sequence[Sampler]) -> Tensor:
    logits = raw
    if any(sampler.changes_logits for sampler in samplers):
        logits = raw.clone()
        for row, sampler in zip(logits, samplers, strict=True):
            sampler.restrict(row)
            sampler.penalise(row)
    tokens = logits.argmax(dim=-1)
    drawing = [n for n, sampler in enumerate(samplers) if sound[n] and not sampler.sampling.is_greedy]
    by_candidates: dict[int, list[int]] = {}
    for n in drawing:
        by_candidates.setdefault(_first_candidates(samplers[n]), []).append(n)
    for candidates, chosen in by_candidates.items():
        tokens[chosen] = _drawn(logits[chosen], [samplers[n] for n in chosen], candidates)
    return tokens


def _first_candidates(sampler: Sampler) -> int:
    """Count of likeliest tokens that a row's Sampling needs; 0: all, in the order of the vocabulary."""
    if sampler.sampling.top_k:
        return sampler.sampling.top_k
    return FIRST_CANDIDATES if sampler.sampling.top_p < 1 else 0


def _drawn(logits: Tensor, samplers: Sequence[Sampler], candidates: int) -> Tensor:
    """Draw a token for each row from those that its Sampling leaves; all rows have equally many candidates."""
    temperature = _column([sampler.sampling.temperature for sampler in samplers], logits)
    shares = ((logits - logits.amax(dim=-1, keepdim=True)) / temperature).softmax(dim=-1)
    top_p = _column([sampler.sampling.top_p for sampler in samplers], logits)
    min_p = _column([sampler.sampling.min_p for sampler in samplers], logits)
    draws = torch.tensor([[sampler.draw()] for sampler in samplers], dtype=torch.float64, device=logits.device)
    if not candidates:
        return _inverted(_above(shares, min_p), draws)
    likeliest = shares.topk(min(candidates, shares.shape[-1]), dim=-1)
    is_cut_short = [not sampler.sampling.top_k for sampler in samplers]
    lacking = [n for n, mass in enumerate(likeliest.values.sum(dim=-1).tolist()) if is_cut_short[n] and mass < top_p[n]]
    places = _inverted(_above(_nucleus(likeliest.values, top_p, is_cut_short), min_p), draws)
    tokens = likeliest.indices.gather(1, places[:, None]).squeeze(1)
    if lacking and likeliest.values.shape[-1] < shares.shape[-1]:
        ordered = shares[lacking].sort(dim=-1, descending=True, stable=True)
        nucleus = _nucleus(ordered.values, top_p[lacking], [True] * len(lacking))
        places = _inverted(_above(nucleus, min_p[lacking]), draws[lacking])
        tokens[lacking] = ordered.indices.gather(1, places[:, None]).squeeze(1)
    return tokens


def _nucleus(shares: Tensor, top_p: Tensor, is_whole: Sequence[bool]) -> Tensor:
    """Zero the shares beyond top-p (arXiv 1904.09751, section 3.1). ``is_whole``: shares of the whole vocabulary."""
    sums = shares.double().cumsum(dim=-1)
    whole = torch.tensor(is_whole, device=shares.device)[:, None]
    total = torch.where(whole, torch.ones_like(sums[:, -1:]), sums[:, -1:])
    return shares * (sums - shares < top_p * total)


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


def _alternatives(raw: Tensor, normaliser: Tensor, samplers: Sequence[Sampler]) -> list[tuple[Token, ...]]:
    wanted = [sampler.sampling.logprobs or 0 for sampler in samplers]
    if not any(wanted):
        return [()] * len(wanted)
    likeliest = (raw - normaliser[:, None]).topk(min(max(wanted), raw.shape[-1]), dim=-1)
    rows = zip(likeliest.indices.tolist(), likeliest.values.tolist(), wanted, strict=True)
    return [tuple(map(Token, tokens[:count], logprobs[:count])) for tokens, logprobs, count in rows]
