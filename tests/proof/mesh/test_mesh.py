"""The simulated mesh: sizes as published, costs that grow with what they are for, and what the paper's text claims."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from experts.llm.parallel.costs import ExchangeForm, LinkCosts
from proof.mesh.decoding import (
    BASELINE,
    COSTS,
    GPU_TOKENS,
    LAUNCH_S,
    OPTIMISED,
    STANDARD,
    TABLE_6,
    decode,
    fits,
    forms_of,
)
from proof.mesh.figures import (
    GPU_COUNTS,
    figure_11,
    fitted_baseline,
    gains_of,
    grid_of,
    messages_of,
    simulate_figures,
    write_figures,
)
from tests.commands import coserve

PUBLISHED = (52, 107.7, 349.0, 1064.9, 2024.0)  # billions of parameters (Table 6)
FORMS = [form for model in TABLE_6 for form in forms_of(model)]
MESHES = st.sampled_from([(form, gpus) for form in FORMS for gpus in (8, 16, 32, 64, 128)])


@pytest.fixture(scope="module")
def measured():
    return simulate_figures()


@pytest.mark.parametrize(("model", "billions"), list(zip(TABLE_6, PUBLISHED, strict=True)))
def test_sizes_equal_those_of_table_6(model, billions):
    assert model.parameters / 1e9 == pytest.approx(billions, rel=0.02)


def test_pyramid_and_student_have_their_published_sizes():
    _, residual, student = forms_of(TABLE_6[0])
    assert residual.moe_experts == (64,) * 10 + (128,) * 2
    assert (student.layers, len(student.moe_experts)) == (21, 10)
    assert [form.parameters / 1e9 for form in (residual, student)] == pytest.approx([31, 27], rel=0.02)


@given(MESHES)
def test_more_gpus_hold_less_each(mesh):
    model, gpus = mesh
    assert model.gpu_bytes(2 * gpus) < model.gpu_bytes(gpus)
    assert fits(model, 2 * gpus) or not fits(model, gpus)


@given(MESHES, st.sampled_from(["message_s", "byte_s"]), st.sampled_from(["inside", "between"]))
def test_dearer_messages_never_shorten_a_step(mesh, cost, link):
    model, gpus = mesh
    links = getattr(COSTS, link)
    dearer = replace(COSTS, **{link: replace(links, **{cost: 3 * getattr(links, cost)})})
    for system in (BASELINE, OPTIMISED):
        before, after = decode(model, gpus, system), decode(model, gpus, system, costs=dearer)
        assert after.latency_s >= before.latency_s
        assert after.compute_s == before.compute_s
    beyond_a_node = gpus > 8
    if link == "between":
        assert (after.latency_s > before.latency_s) == beyond_a_node


@given(MESHES, st.integers(1, 32))
def test_optimised_system_is_no_slower_than_padded_rows_and_the_flat_exchange(mesh, gpu_tokens):
    model, gpus = mesh
    ours = decode(model, gpus, OPTIMISED, gpu_tokens)
    theirs = decode(model, gpus, replace(BASELINE, launch_s=LAUNCH_S), gpu_tokens)
    assert theirs.exchange is ExchangeForm.FLAT
    assert ours.compute_s <= theirs.compute_s
    assert ours.launches < theirs.launches
    assert ours == decode(model, gpus, OPTIMISED, gpu_tokens)


def test_moe_experts_without_tokens_are_not_read():
    """One token a GPU on 8 GPUs: at most 8 of 128 are read, while the one-hot form computes all."""
    model = TABLE_6[0]
    assert decode(model, 8, OPTIMISED, 1).compute_s < decode(model, 8, OPTIMISED, 64).compute_s / 2
    assert decode(model, 8, BASELINE, 1).compute_s == pytest.approx(decode(model, 8, BASELINE, 8).compute_s, rel=0.01)


def test_free_messages_and_launches_leave_weights_and_arithmetic():
    free = replace(COSTS, inside=LinkCosts(0, 0), between=LinkCosts(0, 0), call_s=0.0)
    for model in TABLE_6:
        step = decode(model, 64, replace(OPTIMISED, launch_s=0.0), costs=free)
        assert step.latency_s == step.compute_s
        assert step.gpu_tokens_per_s == GPU_TOKENS / step.compute_s


def test_number_of_messages_follows_the_papers_orders():
    for ranks in GPU_COUNTS[3:]:
        assert messages_of(ranks) == (ranks - 1, 7 + ranks // 8 - 1, ranks // 8 - 1, 7)
    assert messages_of(4) == (3, 3, 0, 3)


def test_only_the_launch_of_the_baseline_is_fitted(measured):
    gains = gains_of(grid_of(measured.rows))
    assert max(gains) == pytest.approx(7.3)
    assert min(gains) > 1
    assert LAUNCH_S < fitted_baseline().launch_s < 1e-4
    assert [step.gpus for step in figure_11(grid_of(measured.rows), OPTIMISED)] == [128, 128, 128, 256, 256]


def test_all_but_three_claims_of_the_papers_text_hold(measured):
    short = {target.what: target.found for target in measured.targets if target.reached is False}
    assert short == {
        "10: baseline latency, 32 GPUs over 64": "1.05",
        "12: half the GPUs for PR-MoE+MoS": "4 of 5",
        "13: PR-MoE+MoS is not the fastest on": "2",
    }
    assert len(measured.targets) == 12


def test_super_linear_throughput_needs_more_than_one_sequence_per_gpu():
    target = simulate_figures(1).targets[1]
    assert (target.what, target.reached) == ("10: optimised throughput per GPU, 64 over 8", False)


def test_every_system_and_form_is_simulated_where_it_fits(measured):
    grid = grid_of(measured.rows)
    assert len(grid) == len(measured.rows)
    assert (BASELINE.name, "47B+MoE-128", STANDARD, 64) not in grid
    assert max(step.gpus for step in measured.rows if step.system == BASELINE.name) == 128
    assert all(
        step.latency_s == pytest.approx(step.compute_s + step.messages_s + step.launches_s) for step in grid.values()
    )


@pytest.mark.slow
def test_charts_and_text_are_written(measured, tmp_path):
    write_figures(tmp_path, measured)
    text = (tmp_path / "mesh.md").read_text("utf-8")
    charts = sorted(tmp_path.glob("*.png"))
    assert len(charts) == 5 + len(TABLE_6)
    for chart in charts:
        assert f"]({chart.name})" in text
        with Image.open(chart) as image:
            assert image.size[0] > 900
    assert "SHORT" in text


@pytest.mark.slow
def test_mesh_command_prints_one_object(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = json.loads(coserve("bench", "mesh", "--out", "figures", "--json", check=0).stdout)
    assert {"machine", "rows", "targets", "notes"} <= found.keys()
    assert found["rows"][0]["model"] == "1.3B+MoE-128"
    assert (tmp_path / "figures" / "mesh.md").exists()
