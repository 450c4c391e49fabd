"""`make mutants`: is every decision of the core, and every promise of the records, held by a test?

mutmut changes the code in one place at a time and runs the tests that reach it. A change that no test notices, a
survivor, is code that could be wrong unseen. It works on a copy in ``mutants/``, which git ignores; nothing else is
written. Ends with 1 when fewer than 95 % of the mutants are killed, or when the time was up before all had their turn.

A mutant whose tests go on for ever has timed out: that counts as not killed, since on a busy machine any test may.
``.venv/bin/mutmut show NAME`` shows a survivor. mutmut leaves alone what runs at import (tables, defaults) and
decorated functions, properties among them.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

ROOT = Path(__file__).parents[1]
WORKPLACE = ROOT / "mutants"
LOG = WORKPLACE / "run.log"
MUTMUT = Path(sysconfig.get_path("scripts"), "mutmut")
LEAST_KILLED = 0.95
KILLED, SURVIVED, TIMED_OUT, NOT_RUN = "killed", "survived", "timeout", "not checked"  # mutmut's words


def main(limit_minutes: str, only: str = "") -> int:
    """``only``: a module such as agent.core.queue; all of them else."""
    shutil.rmtree(WORKPLACE, ignore_errors=True)  # what an earlier run found says nothing of the tests as they are now
    WORKPLACE.mkdir()
    print(f"up to {limit_minutes} minutes; {LOG.relative_to(ROOT)} tells how far it is", flush=True)
    ended = run_mutmut([f"{only}.*"] if only else [], 60 * float(limit_minutes))
    listing = subprocess.run([MUTMUT, "results", "--all", "true"], cwd=ROOT, capture_output=True, text=True, check=True)
    found = {name: result for name, result in results_in(listing.stdout).items() if name.startswith(only)}
    print(report(found))
    if is_enough(found.values()):
        return 0
    print(f"too few mutants were killed, or not all had their turn ({ended}: {LOG.relative_to(ROOT)})", file=sys.stderr)
    return 1


def run_mutmut(patterns: Sequence[str], limit_s: float) -> str:
    """Run it behind everything else on this machine until it ends or its time does; which of the two it was."""
    command = ["nice", "-n", "19", str(MUTMUT), "run", "--max-children", "1", *patterns]
    environment = {
        name: value for name, value in os.environ.items() if name != "PYTHONPATH"
    }  # the copy is to be tested
    with (
        LOG.open("wb") as log,
        subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, env=environment) as process,
    ):
        try:
            return f"mutmut ended with {process.wait(limit_s)}"
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)  # it ends its worker, too
            return "the time was up"


def results_in(listing: str) -> dict[str, str]:
    """What became of each mutant, from what `mutmut results` prints."""
    told = (line.strip().rpartition(": ") for line in listing.splitlines())
    return {name: result for name, _, result in told if name}


def is_enough(results: Iterable[str]) -> bool:
    """Every mutant had its turn, and of all of them enough were killed."""
    counts = Counter(results)
    return counts[KILLED] > 0 and not counts[NOT_RUN] and counts[KILLED] >= LEAST_KILLED * counts.total()


def report(found: Mapping[str, str]) -> str:
    """Every mutant that was not killed, then a row for each module and one for all."""
    of_module: dict[str, Counter[str]] = {}
    for name, result in found.items():
        of_module.setdefault(name.rpartition(".")[0], Counter())[result] += 1
    others = [f"{result:>11}  {name}" for name, result in sorted(found.items()) if result not in (KILLED, NOT_RUN)]
    rows = [row(module, of_module[module]) for module in sorted(of_module)]
    return "\n".join([*others, *rows, row("all", Counter(found.values()))])


def row(name: str, counts: Counter[str]) -> str:
    others = counts.total() - counts[KILLED] - counts[SURVIVED] - counts[TIMED_OUT] - counts[NOT_RUN]
    share = counts[KILLED] / max(counts.total(), 1)
    return (
        f"{name:24}{counts.total():5} mutants, {share:6.1%} killed: {counts[KILLED]} killed, "
        f"{counts[SURVIVED]} survived, {counts[TIMED_OUT]} timed out, {others} reached by no test or broken, "
        f"{counts[NOT_RUN]} not run"
    )


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
