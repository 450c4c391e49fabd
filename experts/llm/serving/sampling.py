"""Sampling of tokens from logits: each row by its own Sampling, all rows at once if that saves time.

Guarantees: a draw depends on the request's logits, tokens and seed, on no neighbour and no device. A row with NaN or
infinity is reported. A grammar comes first, then penalties, temperature, top-k, top-p over the rest of top-k, and
min-p. Logprobs are those of the model's own distribution, before all of these.

Python draws on the host, before the logits are there: so a row's draw, its Sampling and its penalties go to the device
with the batch, and nothing on the way to the token asks the device for a value.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict, deque
from typing import TYPE_CHECKING

import numpy as np
import torch

from experts.devices.copies import Download, Upload
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
        self._draws: deque[float] = deque()  # of the next tokens
        self.seen = SeenTokens(prompt) if sampling.has_penalties else None
        self.grammar = None if grammar is None else grammar.begin()

    def draw(self, ahead: int = 0) -> float:
        """Draw of the next token, or of one that comes later. It stays the same until ``wrote``."""
        while len(self._draws) <= ahead:
            self._draws.append(self._random.random())
        return self._draws[ahead]

    def wrote(self, token: int) -> None:
        if self._draws:
            self._draws.popleft()
        if self.seen is not None:
            self.seen.wrote(token)
        if self.grammar is not None:
            self.grammar.wrote(token)

    @property
    def changes_logits(self) -> bool:
        """By the tokens that it wrote."""
        return self.sampling.has_penalties or self.grammar is not None

    @property
    def banned(self) -> np.ndarray | None:
        """True for each token that the grammar forbids; None for none, and after the grammar's fault."""
        return None if self.grammar is None else self.grammar.banned()

    def penalise(self, logits: Tensor, tokens: Tensor, counts: Tensor) -> None:
        """Apply the penalties for read and written tokens to a row of logits, in place."""
        sampling, own = self.sampling, logits[tokens]
        if sampling.repetition_penalty != 1:
            own = torch.where(own > 0, own / sampling.repetition_penalty, own * sampling.repetition_penalty)
        own = own - sampling.presence_penalty * (counts > 0) - sampling.frequency_penalty * counts
        logits[tokens] = own


class SeenTokens:
    """Distinct tokens of a text, with the count of writes of each. Adding a token does not scan the others."""

    def __init__(self, prompt: Iterable[int]) -> None:
        self._places = {token: place for place, token in enumerate(dict.fromkeys(prompt))}
        room = max(FIRST_SEEN, 2 * len(self._places))
        self._tokens = np.zeros(room, np.int64)
        self._tokens[: len(self._places)] = list(self._places)
        self._counts = np.zeros(room, np.float32)

    def wrote(self, token: int) -> None:
        place = self._places.setdefault(token, len(self._places))
        if place == len(self._tokens):
            self._tokens = np.concatenate((self._tokens, np.zeros_like(self._tokens)))
            self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
        self._tokens[place] = token
        self._counts[place] += 1

    @property
    def tokens(self) -> np.ndarray:
        return self._tokens[: len(self._places)]

    @property
    def counts(self) -> np.ndarray:
        return self._counts[: len(self._places)]


def sample(logits: Tensor, samplers: Sequence[Sampler]) -> list[Token | None]:
    """The next token of each row, (rows, vocabulary); None where a row's logits are not finite."""
    rows, results = SampledRows(samplers, Upload(logits.device)), Download(logits.device)
    rows.run(logits, results)
    results.fetch()
    return rows.tokens(results)


class SampledRows:
    """Sampling of rows of logits, each by its sampler; rows of one sampler are those of its next tokens.

    Planned before the logits are there, run on their device, and read after the download.
    """

    def __init__(self, samplers: Sequence[Sampler], numbers: Upload) -> None:
        self._samplers = samplers
        self._numbers = numbers
        self._logprobs = Logprobs([sampler.sampling.logprobs for sampler in samplers])
        self._seen = {
            n: (numbers.add(torch.from_numpy(sampler.seen.tokens)), numbers.add(torch.from_numpy(sampler.seen.counts)))
            for n, sampler in enumerate(samplers)
            if sampler.seen is not None
        }
        samplings, ahead = [sampler.sampling for sampler in samplers], Counter[Sampler]()
        draws, by_kind = [0.0] * len(samplers), defaultdict[tuple[int, bool], list[int]](list)
        for n, (sampler, sampling) in enumerate(zip(samplers, samplings, strict=True)):
            if not sampling.is_greedy:
                by_kind[sampling.top_k, sampling.top_p < 1].append(n)
                draws[n] = sampler.draw(ahead[sampler])
                ahead[sampler] += 1
        self._kinds = [
            (top_k, has_top_p, None if len(rows) == len(draws) else numbers.add(torch.tensor(rows)))
            for (top_k, has_top_p), rows in by_kind.items()
        ]
        if by_kind:
            settings = [(one.temperature, one.top_p, one.min_p) for one in samplings]
            self._settings = numbers.add(torch.tensor(settings, dtype=torch.float32))
            self._draws = numbers.add(torch.tensor(draws, dtype=_sum_dtype(numbers.device)))
        self._tokens = self._sound = 0  # numbers of the results

    def run(self, logits: Tensor, results: Download) -> None:
        with torch.inference_mode():
            raw = logits.float()
            highest, tokens = raw.max(dim=-1)
            changed = raw
            if self._seen or any(sampler.grammar is not None for sampler in self._samplers):
                changed = self._changed(raw)
                tokens = changed.argmax(dim=-1)
            for top_k, has_top_p, place in self._kinds:
                rows = slice(None) if place is None else self._numbers[place]
                settings, draws = self._numbers[self._settings][rows], self._numbers[self._draws][rows]
                tokens[rows] = _Draw(changed[rows], settings, draws).tokens(top_k, has_top_p=has_top_p)
            self._sound, self._tokens = results.add(highest.isfinite()), results.add(tokens)
            self._logprobs.run(raw, tokens, results)

    def tokens(self, results: Download) -> list[Token | None]:
        sound, tokens = results[self._sound].tolist(), results[self._tokens].tolist()
        drawn = zip(tokens, *self._logprobs.told(results), sound, strict=True)
        return [Token(token, logprob, others) if is_sound else None for token, logprob, others, is_sound in drawn]

    def _changed(self, raw: Tensor) -> Tensor:
        """Logits by grammars and penalties. The device runs the model until the masks are there: they go up late."""
        logits, numbers, most = raw.clone(), self._numbers, raw.shape[-1]
        bans = [(n, banned) for n, sampler in enumerate(self._samplers) if (banned := sampler.banned) is not None]
        places = [(n, numbers.add(torch.from_numpy(banned[:most]))) for n, banned in bans]
        for n, place in places:
            known = numbers[place]
            logits[n, : len(known)].masked_fill_(known, -torch.inf)
            logits[n, len(known) :].fill_(-torch.inf)  # the model's vocabulary may be padded
        for n, (tokens, counts) in self._seen.items():
            self._samplers[n].penalise(logits[n], numbers[tokens], numbers[counts])
        return logits


class _Draw:
    """Draw of a token for each row from those that its Sampling leaves.

    ``settings``: each row's temperature, top-p and min-p.
    """

    def __init__(self, logits: Tensor, settings: Tensor, draws: Tensor) -> None:
        self._logits = logits
        self._temperature, self._top_p, self._min_p = settings[:, :, None].unbind(dim=1)
        self._draws = draws[:, None]

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
        if shares.device.type != "cpu":  # which may not be asked whether fewer are enough
            ordered = shares.sort(dim=-1, descending=True, stable=True)
            return self._chosen(ordered.values, ordered.indices, slice(None))
        tokens = torch.zeros(len(shares), dtype=torch.int64)
        rows, least = list(range(len(shares))), self._top_p.flatten().tolist()
        for candidates in (FIRST_CANDIDATES, MORE_CANDIDATES, shares.shape[-1]):
            own = shares if len(rows) == len(shares) else shares[rows]
            if candidates < shares.shape[-1]:
                ordered = own.topk(candidates, dim=-1)
            else:
                ordered = own.sort(dim=-1, descending=True, stable=True)
            tokens[rows] = self._chosen(ordered.values, ordered.indices, rows)
            held = ordered.values.sum(dim=-1).tolist()
            rows = [row for row, mass in zip(rows, held, strict=True) if mass < least[row]]
            if not rows or candidates >= shares.shape[-1]:
                break
        return tokens

    def _chosen(self, shares: Tensor, indices: Tensor, rows: slice | list[int], *, is_whole: bool = True) -> Tensor:
        nucleus = _nucleus(shares, self._top_p[rows], is_whole=is_whole)
        places = _inverted(_above(nucleus, self._min_p[rows]), self._draws[rows])
        return indices.gather(1, places[:, None]).squeeze(1)


def _nucleus(shares: Tensor, top_p: Tensor, *, is_whole: bool) -> Tensor:
    """Zero the shares beyond top-p (arXiv 1904.09751, section 3.1). ``is_whole``: shares of the whole vocabulary."""
    sums = _sums(shares)
    return shares * (sums - shares < (top_p if is_whole else top_p * sums[:, -1:]))


def _above(shares: Tensor, min_p: Tensor) -> Tensor:
    return shares * (shares >= min_p * shares.amax(dim=-1, keepdim=True))


def _inverted(shares: Tensor, draws: Tensor) -> Tensor:
    """Places of the draws in the rows' cumulative shares, which need not sum to 1. A share of 0 is never drawn."""
    sums = _sums(shares)
    places = torch.searchsorted(sums, draws * sums[:, -1:], right=True).squeeze(1)
    last = (shares > 0).long().cumsum(dim=-1).argmax(dim=-1)  # a draw may round up to the sum itself
    return torch.minimum(places, last)


def _sums(shares: Tensor) -> Tensor:
    return shares.to(_sum_dtype(shares.device)).cumsum(dim=-1)


def _sum_dtype(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64  # which Apple's device does not have


class Logprobs:
    """Logprob of each row's token, and as many alternatives as ``wanted``; 0 and none for rows that want None."""

    def __init__(self, wanted: Sequence[int | None]) -> None:
        self._wanted = wanted
        self._own = self._tokens = self._values = 0  # numbers of the results

    def run(self, raw: Tensor, tokens: Tensor, results: Download) -> None:
        if all(count is None for count in self._wanted):
            return
        normaliser = raw.logsumexp(dim=-1)
        self._own = results.add(raw.gather(1, tokens[:, None]).squeeze(1) - normaliser)
        most = min(max(count or 0 for count in self._wanted), raw.shape[-1])
        likeliest = (raw - normaliser[:, None]).topk(most, dim=-1)
        self._tokens, self._values = results.add(likeliest.indices), results.add(likeliest.values)

    def told(self, results: Download) -> tuple[Sequence[float], Sequence[tuple[Token, ...]]]:
        wanted = self._wanted
        if all(count is None for count in wanted):
            return [0.0] * len(wanted), [()] * len(wanted)
        own = zip(results[self._own].tolist(), wanted, strict=True)
        rows = zip(results[self._tokens].tolist(), results[self._values].tolist(), wanted, strict=True)
        alternatives = [tuple(map(Token, tokens[: count or 0], values)) for tokens, values, count in rows]
        return [0.0 if count is None else logprob for logprob, count in own], alternatives


class WeighedRows:
    """Logprobs of given tokens behind rows of logits. ``wanted``: place among ``rows``, and token, of each."""

    def __init__(self, rows: Sequence[int], wanted: Sequence[tuple[int, int]], numbers: Upload) -> None:
        self._numbers = numbers
        self._rows = numbers.add(torch.tensor(rows))
        self._wanted = numbers.add(torch.tensor(wanted).t())
        self._sound = self._logprobs = 0  # numbers of the results

    def run(self, logits: Tensor, results: Download) -> None:
        own = logits[self._numbers[self._rows]]
        places, tokens = self._numbers[self._wanted]
        self._sound = results.add(own.isfinite().all(dim=-1))
        self._logprobs = results.add(own.float().log_softmax(dim=-1)[places, tokens])

    def logprobs(self, results: Download) -> tuple[list[bool], list[float]]:
        """Whether each row is finite, and the logprobs as they were wanted."""
        return results[self._sound].tolist(), results[self._logprobs].tolist()
