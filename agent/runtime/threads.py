"""How many threads the operators of one thread use: a count of its own for each of ours.

Guarantees: after ``use_threads`` no other thread's count changes this one's. torch alone does not promise that: at a
thread's first operator it takes over the count that any thread was given last, and what the thread itself had been
given before is lost. An executor with two cores then runs on one, because a preparation thread asked for one.
"""

from __future__ import annotations

import torch


def use_threads(count: int) -> None:
    """Operators that the calling thread runs from now on use so many threads."""
    torch.get_num_threads()  # the thread's first question: the latest count of any thread is taken over here, not later
    torch.set_num_threads(count)
