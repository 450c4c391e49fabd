"""A new version in the shadow of the one that serves: shown the same images, compared, and never deciding."""

from agent.commands.experts import promote
from agent.records.shadow_answers import read_comparison
from experts.expert import Verdict
from tests.agent.service.fake_line import asked, picture
from tests.lines import order as order_of
from tests.waiting import until

OK, NG, UNKNOWN = Verdict.OK, Verdict.NG, Verdict.UNKNOWN


def with_shadow(line, **model):
    """f2 in the shadow of f0, on no route."""
    line.add_expert(2, has_route=False)
    line.document["experts"]["cls/f0"]["shadow"] = "cls/f2"
    line.fake(2, **model)


def compared(line):
    return read_comparison(line.folder / "state" / "results.db", "cls/f0", "cls/f2")


def judge(service, component="c0", count=1):
    for _ in range(count):
        ((part,),) = asked(service, order_of(picture(), component=component))
        yield part


def test_a_shadow_is_shown_what_its_expert_judged_and_decides_nothing(line):
    with_shadow(line, label="bad", weight_bytes=900_000)
    with line.served() as service:
        parts = list(judge(service, count=5))
        assert [(part.verdict, part.experts) for part in parts] == [(OK, ("cls/f0",))] * 5
        assert [part.verdict for part in judge(service, component="c1")] == [OK]
        until(lambda: (found := compared(line)) is not None and found.images == 5)
        statistics = service.agent.loop.statistics().engine
        status = service.desk.status().shadows
    comparison = compared(line)
    assert (comparison.agreeing, comparison.flips_to_ng, comparison.flips_to_ok) == (0, 5, 0)
    assert (comparison.failed, comparison.dropped) == (0, 0)
    assert comparison.pair.expert_sha256 != comparison.pair.shadow_sha256
    assert {
        (row.said.label, row.said.passes, row.shadow_said.label, row.shadow_said.passes) for row in comparison.differing
    } == {("ok", True, "bad", False)}
    assert len({row.key for row in comparison.differing}) == 5
    assert {row.verdict for row in line.rows} == {OK}
    assert statistics.arrived == 6
    assert (status.ran, status.failed, status.dropped) == (5, 0, 0)
    assert {(row.said.processor, row.shadow_said.processor) for row in comparison.differing} == {("cpu", "cpu")}
    assert sum(each.images for each in comparison.shadow_ran_on) == 5


def test_a_line_file_that_is_read_anew_gives_an_expert_a_shadow_and_takes_it_away(line):
    with line.served() as service:
        list(judge(service))
        with_shadow(line, label="ok", weight_bytes=900_000)
        line.write()
        assert service.desk.reload().replaced == ()
        list(judge(service, count=3))
        until(lambda: (found := compared(line)) is not None and found.images == 3)
        del line.document["experts"]["cls/f0"]["shadow"]
        del line.document["experts"]["cls/f2"]
        line.write()
        assert service.desk.reload().removed == ("cls/f2",)
        list(judge(service, count=3))
    assert compared(line).images == 3
    assert compared(line).agreement == 1.0


def test_a_promoted_version_serves_after_a_reload_and_the_earlier_one_is_in_its_shadow(line):
    with_shadow(line, label="bad", weight_bytes=900_000)
    with line.served() as service:
        assert [part.verdict for part in judge(service)] == [OK]
        until(lambda: compared(line) is not None)
        before = compared(line).pair
        assert promote(line.folder / "line.yaml", "cls/f0").keys == ("weights",)
        assert service.desk.reload().replaced == ("cls/f0", "cls/f2")
        assert [part.verdict for part in judge(service, count=2)] == [NG, NG]
        until(lambda: compared(line).pair != before and compared(line).images == 2)
    after = compared(line)
    assert (after.pair.expert_sha256, after.pair.shadow_sha256) == (before.shadow_sha256, before.expert_sha256)
    assert (after.flips_to_ng, after.flips_to_ok) == (0, 2)
