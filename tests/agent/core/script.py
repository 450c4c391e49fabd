"""The little language of the tests of the core: what happens to a line, one step after another, and what it does then.

A *case* is a name, the code that makes the line, and a script, divided by bars; see ``played``. Its further lines are
indented, and lines that begin with a hash are left out::

    a head takes the room of what is least wanted | unified(host=3, usage={"a": 0.5, "b": 0.25, "c": 0.75}) |
        bring abc; ask d -> evict b host stage 2, load d ssd>host

A *script* is steps, divided by semicolons::

    step    = verb words [@time] [-> moves | => effects]
    verb    = a method of the line, or an event of PLAIN: started, tick, drain, cancelled 3, wanted a, quarantined a ...
    words   = experts (a), requests (3), components (A) or whatever the verb takes
    time    = seconds at which it happens; without one, when the step before happened

``->`` names all that moves because of the step's last event, divided by commas: `load a ssd>host`,
`evict a host stage 2`, `run a`. ``=>`` names all of its effects but assignments and budgets, divided by bars, with
requests and reasons: `run a 1,2`, `OK 2 after a`, `UNKNOWN 3: cancelled`, `prepare 1 a+c by 0 @4` (for a and later c,
by executor 0, due at 4 s), `forget 1`, `probation a for 1.0 s: why`. `nothing` stands for none of them. Requests
count from 1.

Verbs of each line: `ask a` (a request for one expert), `arrive A` (one for a component), `asks AAB` (several),
`loaded a`, `load_failed a`, `bad a` (its weights are), `finished a`, `failed a`, `short a` (of memory: its batch),
`run a` (asked and loaded), `bring ab` (run and finished), `serve a`, `holds host ab` (asserts the copies there).
"""

import re

import pytest

from agent.core import events
from agent.core.effects import Complete, Evict, Fail, Forget, Prepare, StandingChanged, StartBatch, StartLoad

PLAIN = {
    "started": events.Started,
    "tick": events.Tick,
    "drain": events.Drain,
    "cancelled": lambda request: events.Cancelled(int(request)),
    "wanted": events.Wanted,
    "unwanted": events.Unwanted,
    "quarantined": lambda expert: events.Quarantined(expert, "bad"),
    "reserved": lambda pool, size: events.Reserved(pool, int(size)),
}


def played(table):
    """A test by the cases of a table."""
    rows = []
    for each in table.strip().splitlines():
        if each.startswith(" ") and not each.lstrip().startswith("#"):
            rows[-1] += each
        elif each[0] not in " #":
            rows.append(each)
    names, *cases = zip(*(" ".join(row.split()).split(" | ", 2) for row in rows), strict=True)
    return pytest.mark.parametrize(("made", "script"), list(zip(*cases, strict=True)), ids=names)


class Script:
    """What plays a script: a shell, whose methods are its verbs. ``words``: what it says of the latest effects."""

    divider = ", "

    def play(self, script):
        for step in script.split(";"):
            did, arrow, wanted = (part.strip() for part in [*re.split("(->|=>)", step, maxsplit=1), "", ""][:3])
            verb, *words = did.split()
            at = {"at": float(words.pop()[1:])} if words and words[-1].startswith("@") else {}
            self.step(verb, words, **at)
            divider = self.divider if arrow == "->" else " | "
            if arrow:
                assert (divider.join(self.words(in_full=arrow == "=>")) or "nothing") == wanted, step

    def step(self, verb, words, **at):
        if verb in PLAIN:
            self.handle(PLAIN[verb](*words), **at)
        else:
            getattr(self, verb)(*words, **at)

    def words(self, *, in_full=False):
        return [word for effect in self.effects if (word := word_of(effect, in_full=in_full))]


def word_of(effect, *, in_full=False):
    if isinstance(effect, StartLoad):
        return f"load {effect.expert} {effect.source}>{effect.pool}"
    if isinstance(effect, Evict):
        return f"evict {effect.expert} {effect.pool} stage {effect.stage}"
    if isinstance(effect, StartBatch):
        return f"run {effect.batch.expert}" + (f" {','.join(map(str, effect.batch.requests))}" if in_full else "")
    if in_full and isinstance(effect, Complete | Fail):
        steps = "".join(step.expert for step in effect.outcome.steps)
        said = [effect.outcome.verdict, str(effect.request), *([f"after {steps}"] if steps else [])]
        return " ".join(said) + (f": {effect.outcome.reason}" if effect.outcome.reason else "")
    if in_full and isinstance(effect, StandingChanged):
        pause = "" if effect.retry_s is None else f" for {effect.retry_s} s"
        return f"{effect.standing} {effect.expert}{pause}: {effect.reason}"
    if in_full and isinstance(effect, Prepare):
        forms = "+".join((effect.expert, *effect.later))
        return f"prepare {effect.request} {forms} by {effect.executor} @{effect.due_s:g}"
    return f"forget {effect.request}" if in_full and isinstance(effect, Forget) else None
