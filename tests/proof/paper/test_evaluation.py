"""The evaluation: one task for real, and targets, searches and figures on rows made by hand."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from experts.errors import ConfigError
from profiler.allocation.decay_window import DecayWindow, SearchEnd, WindowSearch
from proof.paper import tasks
from proof.paper.devices import PaperDevice, read_device
from proof.paper.evaluation import (
    ABLATIONS,
    POLICIES,
    Best,
    Evaluation,
    evaluate,
    evaluation_json,
    evaluation_table,
    highest,
    search_best,
    shortfalls,
    systems,
)
from proof.paper.figures import write_figures
from proof.paper.systems import Loading, System, SystemRow, simulate
from proof.paper.tasks import PaperBoard, task_of

pytestmark = pytest.mark.slow
FOLDER = Path(__file__).parents[3] / "configs" / "devices"
NUMA, UMA = read_device(FOLDER / "numa-rtx3080ti.yaml"), read_device(FOLDER / "uma-apple-m2.yaml")

REACHED = {  # images/s and switches that reach every target
    "samba": (4.0, 1000),
    "samba-all-memory": (5.0, 800),
    "samba-fifo": (3.5, 1200),
    "samba-parallel": (7.0, 1000),
    "casual": (22.0, 90),
    "none": (6.0, 900),
    "em": (8.0, 700),
    "em-ra": (12.0, 400),
    "paper": (26.0, 200),
    "coserve": (30.0, 60),
    "coserve-5s": (29.0, 90),
    "coserve-packed": (33.0, 20),
}


def row(policy, images_per_s, switches, executors=(3, 1), experts=30):
    return SystemRow(
        task="A1",
        device="numa",
        policy=policy,
        images_per_s=images_per_s,
        switches=switches,
        seconds=2500 / images_per_s,
        bytes_read=0,
        evictions=0,
        loads=switches,
        batches=700,
        executors={"gpu": executors[0], "cpu": executors[1]},
        experts=experts,
    )


def best_of(executors, memory):
    sweep = tuple(row("paper", value, 100, executors=counts) for counts, value in executors.items())
    windows = tuple(row("paper", value, 100, experts=experts) for experts, value in memory.items())
    search = WindowSearch((), SearchEnd.BEND, DecayWindow(28, 39), dict(memory), 39)
    return Best("A", "numa", System("paper", "paper", {"gpu": 3, "cpu": 1}, experts=39), sweep, windows, search)


SMALL_TASK = task_of(PaperBoard("T", 150, seed=5), 150, "T")
INNER = best_of({(2, 1): 20.0, (3, 1): 25.0, (4, 1): 24.0, (3, 0): 23.0, (3, 2): 24.5}, {15: 22.0, 39: 25.0, 48: 20.0})


def made(best=INNER, **changed):
    figures = REACHED | changed
    return Evaluation(tuple(row(policy, *figures[policy]) for policy in figures), (best,))


def test_no_target_is_listed_as_short_when_all_are_reached():
    assert shortfalls(made()) == []
    assert evaluation_table(made()).splitlines()[-1] == "target     every one is reached"
    assert [(target.what, target.found, target.reached) for target in made().targets] == [
        ("simulated A1 on numa: paper over Samba-CoE", "6.50", True),
        ("simulated A1 on numa: coserve over paper", "1.154", True),
    ]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"paper": (17.0, 200)}, "paper over Samba-CoE is 4.25, not 4.5 to 12"),
        ({"samba-all-memory": (6.5, 600)}, "paper over Samba-CoE with all memory for experts is 4.00, below 4.5"),
        ({"samba": (2.0, 1000)}, "paper over Samba-CoE is 13.00, not 4.5 to 12"),
        ({"coserve": (26.0, 60)}, "coserve with 26.00 images/s is not above paper with 26.00"),
        ({"em": (6.0, 700)}, "the ablations are not in the paper's order: none 6.00, em 6.00, em-ra 12.00"),
        ({"paper": (26.0, 221)}, "paper has 77.9% fewer switches (1000 to 221), not 78% at least"),
        ({"coserve": (30.0, 400)}, "coserve has 60.0% fewer switches (1000 to 400), not 78%"),
    ],
)
def test_each_missed_target_is_named(changed, said):
    found = shortfalls(made(**changed))
    assert any(said in text for text in found), found
    assert all(text.startswith("A1 on numa: ") for text in found)


@pytest.mark.parametrize(
    ("executors", "memory", "said"),
    [
        ({(2, 1): 20.0, (3, 1): 25.0, (3, 0): 23.0, (3, 2): 24.5}, {15: 1.0, 39: 2.0, 48: 1.0}, "over GPU executors"),
        ({(2, 1): 1.0, (3, 1): 3.0, (4, 1): 2.0, (3, 0): 4.0, (3, 2): 2.0}, {15: 1.0, 39: 2.0, 48: 1.0}, "CPU exec"),
        ({(2, 1): 1.0, (3, 1): 3.0, (4, 1): 2.0, (3, 0): 2.0, (3, 2): 2.0}, {15: 3.0, 39: 2.0, 48: 1.0}, "experts"),
    ],
    ids=["GPU executors", "CPU executors", "memory"],
)
def test_sweep_without_an_inner_optimum_is_named(executors, memory, said):
    found = shortfalls(made(best_of(executors, memory)))
    (text,) = found
    assert text.startswith("board A on numa: the highest throughput over ")
    assert said in text


def test_terminals_table_equals_one_by_hand():
    evaluation = made(em=(6.0, 700), paper=(17.0, 1100))
    samba, all_memory, *others = evaluation.rows
    beside_its_floor = replace(all_memory, roofline_images_per_s=10.0, roofline_fraction=0.5)
    lines = evaluation_table(replace(evaluation, rows=(samba, beside_its_floor, *others))).splitlines()
    assert lines[0] == "task A1 on numa"
    assert [line.split() for line in lines[2:4]] == [
        ["samba", "4.00", "-", "1.00", "0.80", "1000", "-", "3", "gpu,", "1", "cpu"],
        ["samba-all-memory", "5.00", "50%", "1.25", "1.00", "800", "20.0%", "3", "gpu,", "1", "cpu"],
    ]
    assert [line.split()[0] for line in lines[2 : 2 + len(POLICIES)]] == list(REACHED)
    assert lines[2 + len(POLICIES)] == ""
    assert lines[3 + len(POLICIES) :] == [f"SHORT      {text}" for text in shortfalls(evaluation)]


def test_systems_differ_only_in_what_they_are():
    paper = System("paper", "paper", {"gpu": 4, "cpu": 1}, experts=35)
    ours = replace(paper, name="coserve", policy="coserve", loads_in_flight=2)
    by_name = {system.name: system for system in systems(NUMA, SMALL_TASK, paper, ours)}
    assert tuple(by_name) == POLICIES
    assert by_name["samba-parallel"].executors == paper.executors
    for name in ABLATIONS:
        assert replace(by_name[name], name="paper", policy="paper") == paper
    assert replace(by_name["coserve-packed"], name="coserve", loading=Loading.FRAMEWORK) == ours
    assert by_name["coserve-5s"].max_overtake_s == 5.0
    assert replace(by_name["samba-all-memory"], name="samba", experts=None) == by_name["samba"]


@pytest.mark.parametrize("device", [NUMA, UMA], ids=["numa", "uma"])
def test_samba_with_all_memory_for_experts_has_room_for_one_image(device):
    paper = System("paper", "paper", {"gpu": 2, "cpu": 1})
    main, everything = systems(device, SMALL_TASK, paper, paper)[:2]
    rows = simulate(main, device, SMALL_TASK), simulate(everything, device, SMALL_TASK)
    assert rows[1].experts == everything.experts > rows[0].experts
    assert rows[1].switches <= rows[0].switches
    with pytest.raises(ConfigError, match="take fewer of either"):
        simulate(replace(everything, experts=everything.experts + 1), device, SMALL_TASK)


LARGEST_BYTES = max(each.weight_bytes.value for each in UMA.architectures.values())


def found_with_memory_for(gpu, cpu, less_bytes=0):
    """The search where memory holds these executors with maximum batches beside the largest expert, and no more."""
    usable_bytes = LARGEST_BYTES - less_bytes
    for name, count in (("gpu", gpu), ("cpu", cpu)):
        times = [getattr(each, name) for each in UMA.architectures.values()]
        batch_bytes = max(each.workspace_bytes.value * each.max_batch.value for each in times)
        usable_bytes += count * (UMA.processor(name).executor_bytes.value + batch_bytes)
    document = UMA.model_dump()
    host = document["memories"]["host"]
    host["size_bytes"]["value"] = host["system_bytes"]["value"] + usable_bytes
    task = task_of(PaperBoard("T", 60, seed=5), 60, "T")
    return search_best(PaperDevice.model_validate(document), task, "T", System("paper", "paper", {"gpu": 1, "cpu": 1}))


def test_sweep_ends_where_memory_holds_no_more_executors():
    best = found_with_memory_for(gpu=2, cpu=1)
    assert [row.executors for row in best.gpu_sweep] == [{"gpu": 1, "cpu": 1}, {"gpu": 2, "cpu": 1}]
    best = found_with_memory_for(gpu=1, cpu=0)
    assert (best.system.executors, best.gpu_sweep) == ({"gpu": 1, "cpu": 0}, ())
    assert [row.executors for row in best.cpu_sweep] == [{"gpu": 1}]
    with pytest.raises(ConfigError, match="no room for the largest expert, or for an image of each of 2 executors"):
        found_with_memory_for(gpu=1, cpu=0, less_bytes=1)


@pytest.mark.parametrize("device", [NUMA, UMA], ids=["numa", "uma"])
def test_best_setup_is_the_best_of_the_runs(device):
    sample = task_of(PaperBoard("T", 120, seed=5), 120, "T")
    best = search_best(device, sample, "T", System("paper", "paper", {"gpu": 1, "cpu": 1}))
    assert best.gpu_sweep[0].executors == {"gpu": 1, "cpu": 1}
    fastest = max(best.executors, key=lambda each: each.images_per_s)
    assert {"gpu": 0, "cpu": 0} | fastest.executors == best.system.executors
    if device.is_split:
        assert best.system.experts == best.memory[highest(best.memory)].experts
        assert [each.experts for each in best.memory] == sorted({each.experts for each in best.memory})
    else:
        assert (best.memory, best.search) == ((), None)


@pytest.fixture(scope="module")
def one_task():
    """A task of 200 requests in the place of 2,500, and what was told meanwhile."""
    steps = []
    with pytest.MonkeyPatch.context() as shortened:
        shortened.setitem(tasks.REQUESTS, "1", 200)
        evaluation = evaluate([UMA], lambda text, done, total: steps.append((text, done, total)), ("B1",), 120)
    return evaluation, steps


def test_task_has_a_row_for_every_system(one_task):
    evaluation, steps = one_task
    assert {run: tuple(rows) for run, rows in evaluation.runs.items()} == {("B1", "uma"): POLICIES}
    assert [best.system.policy for best in evaluation.best] == ["paper", "coserve"]
    of_all = len(POLICIES)
    assert steps[:2] == [("search for board B on uma", 0, 1), ("search for board B on uma", 1, 1)]
    assert steps[2:] == [("task B1 on uma", done, of_all) for done in range(of_all + 1)]
    found = json.loads(json.dumps(evaluation_json(evaluation)))
    assert found.keys() == {"rows", "shortfalls", "short_form"}
    assert found["rows"][0].keys() >= {"task", "device", "policy", "images_per_s", "switches"}
    assert found["shortfalls"] == shortfalls(evaluation)


def test_short_form_is_marked_wherever_its_figures_are(one_task, tmp_path):
    evaluation, _ = one_task
    said = "Tasks B1 only, and executors and memory were searched for on 120 requests instead of 1,500"
    assert said in evaluation_json(evaluation)["short_form"]
    assert said in evaluation_table(evaluation)
    assert write_figures(evaluation, tmp_path).startswith(f"Short form. {said}")
    full = replace(evaluation, sample_requests=1500)
    assert evaluation_json(full)["short_form"] is None
    assert "only, and" not in evaluation_table(full) + write_figures(full, tmp_path)


def test_figures_hold_the_rows_and_the_papers_words(one_task, tmp_path):
    evaluation, _ = one_task
    text = write_figures(evaluation, tmp_path)
    drawn = sorted(path.name for path in tmp_path.iterdir())
    assert drawn == sorted(f"figure-{number}-uma.png" for number in range(13, 18))
    for name in drawn:
        assert f"({name})" in text
        with Image.open(tmp_path / name) as image:
            assert image.format == "PNG"
    for each in evaluation.rows:
        assert f"| {each.images_per_s:.1f} |" in text
        assert f"| {each.switches} |" in text
    assert "78.5 % (293 to 63)" in text
    assert "| Samba-CoE, all memory for experts |" in text
    assert "No device with separate GPU memory was run." in text
    for missed in shortfalls(evaluation):
        assert f"- {missed}" in text


def test_figures_13_and_14_have_both_rows_of_samba(tmp_path):
    made_by_hand = made()
    rows = tuple(replace(each, experts=53) if each.policy == "samba-all-memory" else each for each in made_by_hand.rows)
    lines = write_figures(replace(made_by_hand, rows=rows), tmp_path).splitlines()
    assert set(lines) >= {
        "| Best over Samba-CoE | 6.5 |",
        "| ours over Samba-CoE, all memory for experts | 6.0 |",
        "| Best, fewer than Samba-CoE | 80.0% |",
        "| ours, fewer than Samba-CoE, all memory for experts | 92.5% |",
    }
    (split,) = (line for line in lines if line.startswith("Samba-CoE's main row keeps 75 %"))
    assert "1,060 switches in task B2 on NUMA." in split
    b2 = tuple(replace(each, task="B2") for each in made(samba=(4.3, 1005)).rows)
    assert "task B2 on NUMA (1,005 here)." in write_figures(Evaluation(b2, (INNER,)), tmp_path)
    changed = "- A1 numa: 30 to 53 experts, 1000 to 800 switches, Best over it 6.50 to 5.20, ours 7.50 to 6.00"
    assert changed in lines


def test_figure_of_memory_has_its_series(tmp_path):
    text = write_figures(made(), tmp_path)
    assert (tmp_path / "figure-18.png").is_file()
    assert "| A | numa | 28 to 39, short of the line | 39 experts, 25.0 images/s | window 28 to 39, 35 experts" in text
    assert "Nothing: every target is reached." in text
