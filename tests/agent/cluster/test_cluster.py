"""A line whose workers are in a Ray cluster; without the extra it is refused with what to install."""

import subprocess
import sys

import psutil
import pytest

from agent.cluster import extra
from tests.agent.deployment.test_worker_manager import IMAGE, Verdict, judged, workers_line
from tests.commands import coserve
from tests.waiting import until


def test_line_in_a_cluster_without_the_extra_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(extra, "find_spec", lambda _: None)
    line = workers_line(tmp_path, address="10.0.0.1:6379")
    told = "cluster.address: a cluster needs ray and pyarrow: install the extra with `pip install 'coserve[cluster]'`"
    assert told in line.refusal()
    checked = coserve("config", "check", line.file)
    assert checked.exit_code == 78
    assert told in checked.stderr


@pytest.mark.slow
def test_images_are_judged_by_actors_and_what_ray_reports_is_logged(tmp_path, caplog, capsys):
    caplog.set_level("INFO")
    ray = pytest.importorskip("ray", reason="coserve[cluster] is not installed")
    local = {"address": "local", "include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
    with (
        ray.init(num_cpus=2, **local),
        workers_line(tmp_path, address="auto").built(starts=True) as (agent, outcomes, _),
    ):
        assert {each.verdict for each in judged(agent, outcomes, [IMAGE] * 12)} == {Verdict.OK}
        assert agent.loop.workers == ["w1", "w2"]
        actors = [each for each in psutil.Process().children(recursive=True) if "WorkerActor" in each.name()]
        actors[0].kill()
        assert "executors_joined" not in caplog.text
        until(lambda: "cluster_error" in caplog.text and "executors_joined" in caplog.text)
    assert capsys.readouterr().out == ""  # where a command writes its JSON


@pytest.mark.slow
def test_unreachable_cluster_ends_the_start(tmp_path):
    """In a process of its own: Ray reads its settings when it is imported."""
    pytest.importorskip("ray", reason="coserve[cluster] is not installed")
    line = workers_line(tmp_path, address="127.0.0.1:1")
    line.write()
    call = [sys.executable, "-c", "from agent.cli.app import app; app()", "serve", str(line.file)]
    ended = subprocess.run(call, capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == 1
    assert "the cluster at 127.0.0.1:1: " in ended.stderr
