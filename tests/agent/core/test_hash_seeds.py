"""Equal events give equal effects in every process, with any hash seed."""

import hashlib
import os
import subprocess
import sys

from hypothesis import given, settings

from tests.agent.core.test_engine_properties import SHORT, choosing, play, setups


def write_digest():
    """Digest of every effect of some plays, equal in each process."""
    digest = hashlib.sha256()

    @settings(SHORT, derandomize=True, database=None, max_examples=12)
    @given(setups(), choosing())
    def play_into_digest(setup, draw):
        log = play(setup, draw, may_fail=True).log
        digest.update(repr(log).encode())

    play_into_digest()
    sys.stdout.write(digest.hexdigest())


def test_order_of_effects_is_independent_of_the_hash_seed():
    program = [sys.executable, "-m", "tests.agent.core.test_hash_seeds"]
    started = [
        subprocess.Popen(program, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONHASHSEED": str(seed)})
        for seed in (0, 1, 2)
    ]
    told = [process.communicate(timeout=120)[0] for process in started]
    assert [process.returncode for process in started] == [0] * len(started)
    assert len(set(told)) == 1


if __name__ == "__main__":
    write_digest()
