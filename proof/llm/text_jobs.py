"""What the language models of the benchmark are asked: prompts of random tokens, answers of given lengths."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

SHORTEST_PROMPT, LONGEST_PROMPT = 8, 95
SHORTEST_OUTPUT, LONGEST_OUTPUT = 2, 53
MEDIAN_OUTPUT, OUTPUT_SPREAD = 14, 0.9  # of the log-normal distribution


@dataclass(frozen=True, slots=True)
class TextJob:
    """A prompt, and how many tokens are to follow it: random models know no end."""

    prompt: tuple[int, ...]
    output: int


def mixed_lengths(requests: int, vocabulary: int, seed: int = 0) -> tuple[TextJob, ...]:
    """Prompts of any length within bounds, and outputs of which most are short and a few are long."""
    chance = random.Random(seed)
    return tuple(_job(chance, vocabulary) for _ in range(requests))


def _job(chance: random.Random, vocabulary: int) -> TextJob:
    length = chance.randint(SHORTEST_PROMPT, LONGEST_PROMPT)
    drawn = round(math.exp(chance.gauss(math.log(MEDIAN_OUTPUT), OUTPUT_SPREAD)))
    output = min(max(drawn, SHORTEST_OUTPUT), LONGEST_OUTPUT)
    return TextJob(tuple(chance.randrange(vocabulary) for _ in range(length)), output)
