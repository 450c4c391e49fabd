"""Rendered boards: the same for a seed, true to their labels, cut into the crops that their placements name."""

from collections import Counter
from itertools import combinations

import numpy as np
import pytest

from agent.demo.rendering.components import COMPONENTS, OK
from agent.demo.rendering.render import (
    BOARD_HEIGHT_PX,
    BOARD_WIDTH_PX,
    CROP_PX,
    crop,
    product_layout,
    render_board,
    render_panels,
)


@pytest.fixture(scope="module")
def board():
    return render_board(5, "B5", 0.5, 0.5)


def component(name):
    return next(each for each in COMPONENTS if each.name == name)


def test_catalogue_is_rich_enough():
    assert len({each.name for each in COMPONENTS}) == len(COMPONENTS) == 32  # with the two detectors, 34 experts
    assert all(each.labels[0] == OK and len(set(each.labels)) == len(each.labels) >= 3 for each in COMPONENTS)
    assert all("_" not in each.name and "." not in each.name for each in COMPONENTS)


def test_product_carries_every_component_apart_from_the_others():
    sites = product_layout()
    assert Counter(site.component.name for site in sites) == {each.name: each.quantity for each in COMPONENTS}
    assert len({site.ref for site in sites}) == len(sites)
    assert all(0 < site.x_px < BOARD_WIDTH_PX and 0 < site.y_px < BOARD_HEIGHT_PX for site in sites)
    for one, other in combinations(sites, 2):
        distance = max(abs(one.x_px - other.x_px), abs(one.y_px - other.y_px))
        assert distance >= (one.component.window_px + other.component.window_px) // 2


def test_board_of_a_seed_is_reproducible_and_its_labels_follow_the_rate(board):
    again = render_board(5, "B5", 0.5, 0.5)
    assert again.image.tobytes() == board.image.tobytes()
    assert again.placements == board.placements
    assert render_board(6, "B5", 0.5, 0.5).placements != board.placements
    labels = {each.name: each.labels for each in COMPONENTS}
    assert all(placement.label in labels[placement.component] for placement in board.placements)
    assert 0.3 < np.mean([placement.label != OK for placement in board.placements]) < 0.7


def test_measured_parts_have_a_rate_of_their_own():
    board = render_board(5, "B5", 0.0, 1.0)
    measured = {each.name for each in COMPONENTS if each.measured}
    assert measured
    assert all((each.label != OK) == (each.component in measured) for each in board.placements)


def test_crops_are_square_and_upright(board):
    assert {crop(board, placement).shape for placement in board.placements} == {(CROP_PX, CROP_PX, 3)}
    some, others, reverse = (mean_crop("ic-soic8", *each) for each in ((OK, 0), (OK, 1), ("reversed", 0)))
    assert np.abs(some - others).mean() < 0.5 * np.abs(some - reverse).mean()  # whichever way each lies on its panel


def mean_crop(name, label, seed):
    parts = [(component(name), label)] * 6
    crops = [crop(panel, each) for panel in render_panels(parts, seed) for each in panel.placements]
    return np.mean([each[20:44, 14:50] for each in crops], axis=0)


def test_missing_parts_have_no_body_and_shifted_ones_lie_elsewhere():
    chip = component("resistor-1206")
    parts = [(chip, label) for label in ("missing", "ok", "shifted") for _ in range(8)]
    (panel,) = render_panels(parts, seed=3)
    bodies = {label: [p.body for p in panel.placements if p.label == label] for label in chip.labels}
    assert bodies["missing"] == [None] * 8
    expected = np.array([chip.width_px, chip.height_px]) / chip.window_px
    corners = {label: np.array(bodies[label]).reshape(-1, 2, 2) for label in ("ok", "shifted")}
    sizes = {label: each[:, 1] - each[:, 0] for label, each in corners.items()}
    middles = {label: each.mean(1) for label, each in corners.items()}
    assert np.allclose(sizes["ok"], expected, atol=0.06)
    assert np.allclose(middles["ok"], 0.5, atol=0.02)
    moved = np.abs(middles["shifted"] - 0.5).max(1) > 0.08
    assert (moved | (sizes["shifted"][:, 1] > 1.2 * expected[1])).all()  # or turned


def test_panels_hold_the_wanted_parts_for_any_number_of_threads():
    large = component("electrolytic-6mm")
    parts = [(large, label) for label in large.labels for _ in range(10)]
    one, two = (list(render_panels(parts, seed=4, threads=threads)) for threads in (1, 2))
    assert len(one) > 1
    assert [panel.image.tobytes() for panel in one] == [panel.image.tobytes() for panel in two]
    held = sorted((p.component, p.label) for panel in one for p in panel.placements)
    assert held == sorted((large.name, label) for _, label in parts)
