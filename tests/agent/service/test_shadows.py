"""A new version in the shadow of the one that serves: shown the same images, compared, and never deciding."""

from agent.config import read_line
from agent.deployment.line_change import pair_sha256
from agent.lines.promotion import promote
from agent.records.truth.shadow_answers import read_comparison
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


def test_shadow_sees_its_experts_images_and_decides_nothing(line):
    with_shadow(line, label="bad", weight_bytes=900_000)
    with line.served() as service:
        assert {(part.verdict, part.experts) for part in judge(service, count=5)} == {(OK, ("cls/f0",))}
        assert [part.verdict for part in judge(service, component="c1")] == [OK]
        until(lambda: (found := compared(line)) is not None and found.images == 5)
        arrived, status = service.agent.loop.statistics().engine.arrived, service.desk.status().shadows
    found = compared(line)
    counts = (found.agreeing, found.flips_to_ng, found.flips_to_ok, found.failed, found.dropped)
    assert counts == (0, 5, 0, 0, 0)
    assert found.pair.expert_sha256 != found.pair.shadow_sha256
    answers = {
        (one.label, one.passes, one.processor) for row in found.differing for one in (row.answer, row.shadow_answer)
    }
    assert answers == {("ok", True, "cpu"), ("bad", False, "cpu")}
    assert len({row.key for row in found.differing}) == 5
    assert {row.verdict for row in line.rows} == {OK}
    assert (arrived, status.ran, status.failed, status.dropped) == (6, 5, 0, 0)
    assert sum(each.images for each in found.shadow_ran_on) == 5


def test_answers_on_other_terms_are_not_counted_together(line):
    """The route asks for a higher score than both give: other verdicts, of the same weights."""
    with_shadow(line, label="ok", weight_bytes=900_000)
    with line.served() as service:
        list(judge(service, count=2))
        until(lambda: (found := compared(line)) is not None and found.images == 2)
        line.document["routes"]["c0"][0]["min_score"] = 0.95
        line.write()
        service.desk.reload()
        list(judge(service, count=3))
        until(lambda: (found := compared(line)) is not None and found.images == 3)
        assert compared(line).pair.terms_sha256 == pair_sha256(read_line(line.write()), "cls/f0", "cls/f2")


def test_reload_adds_and_removes_the_shadow_of_an_expert(line):
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
    assert (compared(line).images, compared(line).agreement) == (3, 1.0)


def test_promoted_version_serves_after_a_reload_with_the_earlier_one_as_shadow(line):
    with_shadow(line, label="bad", weight_bytes=900_000)
    with line.served() as service:
        assert [part.verdict for part in judge(service)] == [OK]
        until(lambda: compared(line) is not None)
        before = compared(line).pair
        assert promote(line.folder / "line.yaml", "cls/f0") == ("cls/f2", ("weights",))
        assert service.desk.reload().replaced == ("cls/f0", "cls/f2")
        assert [part.verdict for part in judge(service, count=2)] == [NG, NG]
        until(lambda: compared(line).pair != before and compared(line).images == 2)
    after = compared(line)
    assert (after.pair.expert_sha256, after.pair.shadow_sha256) == (before.shadow_sha256, before.expert_sha256)
    assert (after.flips_to_ng, after.flips_to_ok) == (0, 2)
