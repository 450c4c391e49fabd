"""Pictures of anomalies in a result: kept of images that are NG, where images are kept."""

import pytest

from agent.core.request import Outcome, StepResult
from agent.records.verdict import AnomalyScore
from agent.service.inspections.rows import judged_result
from experts.expert import Anomaly, AnomalyMap, Prediction, Verdict
from tests.lines import subject

HEAT = AnomalyMap(2, 3, -1.5, 4.0, bytes([0, 10, 20, 30, 40, 255]))
STEPS = (
    StepResult("anomaly/0", Prediction("ok", 0.9, anomaly=Anomaly(1.0, 2.0))),
    StepResult("anomaly/1", Prediction("anomalous", 0.9, anomaly=Anomaly(4.0, 2.0, HEAT))),
    StepResult("cls/2", Prediction("missing", 0.8)),
)


@pytest.mark.parametrize(
    ("verdict", "images", "kept"),
    [("NG", "ng", [(1, "anomaly/1")]), ("OK", "all", []), ("UNKNOWN", "ng", []), ("NG", "none", [])],
)
def test_anomaly_map_is_kept_for_ng_images_where_images_are_kept(line, verdict, images, kept):
    line.document["records"] = {"images": images}
    outcome = Outcome(Verdict(verdict), "missing", 0.8, STEPS)
    result = judged_result(line.config, subject(component="c0"), outcome)
    assert [(each.step, each.expert) for each in result.maps] == kept
    assert [step.anomaly for step in result.steps] == [AnomalyScore(1.0, 2.0), AnomalyScore(4.0, 2.0), None]
