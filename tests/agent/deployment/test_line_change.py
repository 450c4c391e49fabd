"""A line file that is read again beside a running agent: only unknown kinds are measured."""

import pytest

from agent.deployment.line_change import plan_change
from tests.agent.line_files import LineFile, expert, fake, route


@pytest.fixture
def line(tmp_path):
    fake(tmp_path / "f0.yaml", 1_000_000)
    experts, routes = {"cls/f0": expert("f0.yaml")}, {"c0": route("cls/f0")}
    return LineFile(tmp_path, experts=experts, routes=routes, device="emulated", memory={"host": "20MiB"})


def changed(line, agent, side, watch=lambda _: None):
    """The change that adds cls/f1 with inputs of this side, and its stages."""
    stages = []
    fake(line.folder / "f1.yaml", 1_000_000)
    line.document["experts"]["cls/f1"] = expert("f1.yaml", side=side)
    line.document["routes"]["c1"] = route("cls/f1")

    def progress(stage, *_):
        stages.append(stage)
        watch(stage)

    change = plan_change(agent, line.config, progress)
    assert change.added == ("cls/f1",)
    return change, stages


def test_new_expert_of_a_served_kind_takes_its_times_without_a_probe(line):
    with line.built(starts=True) as (agent, _, _):
        change, stages = changed(line, agent, side=8)
    assert "probe" not in stages
    for column in change.event.matrix.experts.values():
        served, new = column["cls/f0"], column["cls/f1"]
        assert (new.performance, new.footprint) == (served.performance, served.footprint)
        assert new.load_s == pytest.approx(served.load_s)
        assert new.copy != served.copy


def test_new_expert_of_an_unknown_kind_is_probed_within_the_budget(line):
    def budget_bytes():
        return next(pool.expert_bytes for pool in agent.loop.statistics().engine.pools if pool.name == "host")

    with line.built(starts=True) as (agent, _, _):
        before_bytes, during_bytes = budget_bytes(), []

        def watch(stage):
            if stage == "probe":
                during_bytes.append(budget_bytes())

        _, stages = changed(line, agent, side=16, watch=watch)
        assert "probe" in stages
        assert all(each <= before_bytes - 1_000_000 for each in during_bytes)
        assert budget_bytes() == before_bytes
