"""Questions to the demo's language models: the maintenance manual of a made-up board line, and sums.

The manual's facts are drawn from the seed. Each is asked for in several phrasings; one phrasing of each fact, another
for each machine, is held out, so that a right answer shows that the model knows the fact and not the question. Of the
sums, pairs of numbers are held out. Answers first repeat the question, and sums show the steps: a small model builds on
what it has written.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

MACHINES = ("printer", "mounter", "feeder", "oven", "washer", "coater", "tester", "saw", "scanner", "loader")
# answer, value, phrasings of the question
FACTS: tuple[tuple[str, Callable[[random.Random], str], tuple[str, ...]], ...] = (
    ("Clean the {machine} every {value} days.", lambda chance: str(chance.randint(2, 90)), (
        "When is the {machine} cleaned?", "Clean the {machine} when?", "Cleaning of the {machine}?",
        "How often to clean the {machine}?", "The {machine}, cleaned when?",
    )),
    ("The {machine} takes part {value}.",
     lambda chance: f"{chance.choice('ABCDEFGHKLMNP')}{chance.choice('RSTUVWXZ')}-{chance.randint(10, 99)}", (
        "Which part fits the {machine}?", "Part for the {machine}?", "The part of the {machine}?",
        "The {machine} broke, which part?", "The {machine} takes what part?",
    )),
    ("The {machine} needs oil {value}.", lambda chance: f"{chance.choice('QJY')}{chance.randint(10, 99)}", (
        "Which oil for the {machine}?", "What oils the {machine}?", "Oil of the {machine}?",
        "The {machine} needs which oil?", "Name the oil of the {machine}.",
    )),
    ("The {machine} stops at {value} C.", lambda chance: str(chance.randint(40, 260)), (
        "How hot is the {machine}?", "Heat of the {machine}?", "Is the {machine} too hot?",
        "The {machine} stops at what heat?", "What heat stops the {machine}?",
    )),
)  # fmt: skip
PREFIXES = ("", "Please: ", "Tell me: ")
FIRST_NUMBERS, SECOND_NUMBERS = range(10, 100), range(1, 10)
SUM_PHRASINGS = ("What is {a} + {b}?", "{a} + {b}?", "Add {a} and {b}.")
HELD_OUT_SUMS = 60


class DemoQuestion(NamedTuple):
    text: str
    answer: str


class Questions(NamedTuple):
    """An expert's subject."""

    training: tuple[DemoQuestion, ...]
    held_out: tuple[DemoQuestion, ...]


def manual_questions(seed: int) -> Questions:
    chance = random.Random(seed)
    training, held_out = [], []
    for number, machine in enumerate(MACHINES):
        for words, value, phrasings in FACTS:
            answer = words.format(machine=machine, value=value(chance))
            asked = [phrasing.format(machine=machine) for phrasing in phrasings]
            held_out.append(DemoQuestion(asked.pop(number % len(asked)), answer))
            training += [DemoQuestion(prefix + text, answer) for prefix in PREFIXES for text in asked]
    return Questions(tuple(training), tuple(held_out))


def sum_questions(seed: int) -> Questions:
    """Sums of FIRST_NUMBERS and SECOND_NUMBERS in every phrasing; some pairs are held out."""
    chance = random.Random(seed)
    pairs = [(a, b) for a in FIRST_NUMBERS for b in SECOND_NUMBERS]
    chance.shuffle(pairs)
    asked = [[DemoQuestion(phrasing.format(a=a, b=b), _sum(a, b)) for phrasing in SUM_PHRASINGS] for a, b in pairs]
    held_out = [each[number % len(SUM_PHRASINGS)] for number, each in enumerate(asked[:HELD_OUT_SUMS])]
    return Questions(tuple(one for each in asked[HELD_OUT_SUMS:] for one in each), tuple(held_out))


def _sum(a: int, b: int) -> str:
    return f"{a % 10} + {b} = {a % 10 + b}, so {a} + {b} = {a + b}."
