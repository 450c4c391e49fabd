"""A run's share of the box."""

from types import SimpleNamespace

import pytest

from profiler.replay.host_load import CoresInUse


def test_what_a_process_has_its_children_do_no_others_took(monkeypatch):
    """By hand, of 100 s of all cores: 10 s idle, 20 s this process, 30 s its children, 40 s others."""
    cores = iter([(50.0, 10.0, 40.0), (130.0, 20.0, 50.0)])
    own = iter([(1, 1, 2, 2), (19, 3, 28, 6)])

    class Cores(tuple):
        idle = property(lambda self: self[2])

    def own_times():
        return SimpleNamespace(
            **dict(zip(("user", "system", "children_user", "children_system"), next(own), strict=True))
        )

    psutil = SimpleNamespace(cpu_times=lambda: Cores(next(cores)), Process=lambda: SimpleNamespace(cpu_times=own_times))
    monkeypatch.setattr("profiler.replay.host_load.psutil", psutil)
    assert CoresInUse().others_fraction() == pytest.approx(0.4)
