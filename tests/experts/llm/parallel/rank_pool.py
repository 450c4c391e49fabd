"""Real ranks: processes that meet over gloo, kept for many cases since their start costs more than a case."""

import traceback
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import wait

import torch
import torch.distributed as dist

CONTEXT = get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "torch.distributed", "experts.llm.parallel.rank_model", __name__])
CASE_S = 120.0


def serve_cases(rank, pipe):
    torch.set_num_threads(1)
    while (case := pipe.recv()) is not None:
        run, ranks, meeting, arguments = case
        try:
            dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
            try:
                result = run(*arguments)
            finally:
                dist.destroy_process_group()
            pipe.send((True, result))
        except Exception:  # noqa: BLE001  told to the test, which fails
            pipe.send((False, traceback.format_exc()))


class RankPool:
    def __init__(self, folder):
        self._folder = folder
        self._cases = 0
        self._ranks = []

    def run(self, ranks, run, *arguments):
        """What ``run(*arguments)`` returns on each of so many ranks."""
        while len(self._ranks) < ranks:
            ours, theirs = CONTEXT.Pipe()
            process = CONTEXT.Process(target=serve_cases, args=(len(self._ranks), theirs), daemon=True)
            process.start()
            theirs.close()
            self._ranks.append((process, ours))
        self._cases += 1
        asked = self._ranks[:ranks]
        for _, pipe in asked:
            pipe.send((run, ranks, self._folder / f"meeting-{self._cases}", arguments))
        return [self._result(pipe) for _, pipe in asked]

    def _result(self, pipe):
        assert wait([pipe], CASE_S), "a rank does not answer"
        is_sound, result = pipe.recv()
        assert is_sound, result
        return result

    def close(self):
        for process, pipe in self._ranks:
            process.kill()
            process.join()
            pipe.close()


@contextmanager
def rank_pool(folder):
    pool = RankPool(folder)
    try:
        yield pool
    finally:
        pool.close()
