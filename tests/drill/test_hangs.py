"""What never answers: an expert that hangs, a camera that stalls; the agent ends or goes on, and loses nothing."""

import time

import pytest

from tests.agent.service.test_crashes import HANGING, serve_broken
from tests.agent.sources.cameras.stand_ins import MjpegCamera
from tests.waiting import until

pytestmark = pytest.mark.slow
STOP_S = 10.0
HANGING_ONE = (
    HANGING
    + """
infer = FakeSkeleton.infer

def hang_one(self, expert, batch):
    return hang() if expert.id == "cls/f1" else infer(self, expert, batch)

once_it_serves(lambda: setattr(FakeSkeleton, "infer", hang_one))
"""
)


def test_agent_whose_executor_hangs_ends_and_the_next_one_judges_everything(scene, agents, forks, report):
    scene.drop_many(40)
    ended = serve_broken(forks, scene, HANGING_ONE)
    assert ended.returncode == 1, ended.stderr
    before = len(scene.rows)
    agents.start()
    agents.finish()
    report("hung executor", {"judged before": before} | scene.account())


def test_stalled_camera_is_reconnected(scene, report):
    camera = MjpegCamera()
    asked = {"name": "top", "url": camera.url, "component": "c0", "stall_timeout_s": 1.0}
    scene.document["intake"]["cameras"] = [asked]

    def view():
        return next(each for each in service.desk.status().sources if each.name == "top")

    with scene.served() as service:
        until(lambda: service.judged >= 3)
        camera.word = "stall"
        until(lambda: view().state != "STREAMING")
        scene.drop_many(8)
        until(scene.is_finished)  # the folder's files, meanwhile
        camera.word = "stream"
        until(lambda: view().state == "STREAMING")
        received = view().received
        until(lambda: view().received > received)
        camera.word = "stall"
        started = time.monotonic()
    seconds = time.monotonic() - started
    camera.close()
    verdict = "reached" if seconds < STOP_S else f"SHORT of {STOP_S:g}"
    report("stalled camera", {"stopped in s": f"{seconds:.1f} ({verdict})"} | scene.account())
