"""Exchanges of rows: what arrives where, what comes back, and how many messages it takes."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from experts.llm.parallel.costs import ExchangeForm, LinkCosts, MeshCosts, all_to_all, cheapest
from experts.llm.parallel.exchange import ROWS, exchange_of
from experts.llm.parallel.groups import Mesh
from experts.llm.parallel.shape import MeshShape
from tests.experts.llm.parallel.threads import on_threads

FLAT, HIERARCHICAL, COORDINATED = ExchangeForm.FLAT, ExchangeForm.HIERARCHICAL, ExchangeForm.COORDINATED
COUNTED = [
    (MeshShape(expert=4), FLAT, 3),
    (MeshShape(expert=4, node_ranks=2), HIERARCHICAL, 1 + 1),
    (MeshShape(expert=2, tensor=2), COORDINATED, 1),
    *(
        pytest.param(*each, marks=pytest.mark.slow)
        for each in (
            (MeshShape(expert=8), FLAT, 7),
            (MeshShape(expert=8, node_ranks=2), HIERARCHICAL, 1 + 3),
            (MeshShape(expert=4, tensor=2), COORDINATED, 3),
        )
    ),
]
LARGE = [
    (MeshShape(expert=128, node_ranks=8), FLAT, 127),
    (MeshShape(expert=128, node_ranks=8), HIERARCHICAL, 7 + 15),
    (MeshShape(expert=16, tensor=8, node_ranks=8), COORDINATED, 15),
    (MeshShape(expert=256, node_ranks=8), HIERARCHICAL, 7 + 31),
    (MeshShape(expert=64, tensor=4, node_ranks=8), COORDINATED, 63),
]


def sent_rows(size, slots, rank, counts):
    """Rows that say where they come from and where they go."""
    rows = [(rank, to, slot, n) for to in range(size) for slot in range(slots) for n in range(counts[to][slot])]
    return torch.tensor(rows, dtype=torch.float32).view(-1, 4)


def there_and_back(mesh, form, counts):
    exchange = exchange_of(form, mesh)
    place = mesh.expert.place if form is COORDINATED else mesh.replica.place
    rows = sent_rows(exchange.size, len(counts[0][0]), place, counts[place])
    received, route = exchange.dispatch(rows, torch.tensor(counts[place]))
    returned = route.combine(received * 10)
    assert torch.equal(returned, rows * 10)
    return place, received.tolist(), route.counts.tolist()


def check_arrivals(results, counts):
    for place, received, arrived in results:
        expected = [
            [source, place, slot, n]
            for source in range(len(counts))
            for slot, count in enumerate(counts[source][place])
            for n in range(count)
        ]
        assert received == expected
        assert arrived == [counts[source][place] for source in range(len(counts))]


@st.composite
def exchanges(draw):
    nodes, node_ranks, slots = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    size = nodes * node_ranks
    form = draw(st.sampled_from([FLAT, HIERARCHICAL]))
    row = st.lists(st.integers(0, 3), min_size=slots, max_size=slots)
    counts = draw(st.lists(st.lists(row, min_size=size, max_size=size), min_size=size, max_size=size))
    return MeshShape(expert=size, node_ranks=node_ranks), form, counts


@given(exchanges())
def test_exchanged_rows_arrive_by_source_and_return_in_order(case):
    shape, form, counts = case
    check_arrivals(on_threads(shape, lambda mesh: there_and_back(mesh, form, counts)), counts)


def over_gloo(shape, form, counts):
    mesh = Mesh(shape)
    result = there_and_back(mesh, form, counts)
    return (*result, mesh.record.by_purpose[ROWS])


@pytest.mark.parametrize(("shape", "form", "messages"), COUNTED, ids=str)
def test_gloo_sends_the_papers_number_of_messages(ranks, shape, form, messages):
    size = shape.expert if form is COORDINATED else shape.replica_ranks
    counts = [[[2, 2] for _ in range(size)] for _ in range(size)]
    results = ranks.run(shape.ranks, over_gloo, shape, form, counts)
    check_arrivals([result[:3] for result in results], counts)
    one_way = all_to_all(shape, form, shape.tensor * 4 * 4 * 4 * size)  # pairs of a tensor group, of 4 floats each
    assert one_way.messages == messages
    assert {result[3] for result in results} == {one_way.plus(one_way)}


@pytest.mark.parametrize(("shape", "form", "messages"), LARGE, ids=str)
def test_many_ranks_send_the_papers_number_of_messages(shape, form, messages):
    size = shape.expert if form is COORDINATED else shape.replica_ranks
    counts = [[[1] for _ in range(size)] for _ in range(size)]

    def run(mesh):
        there_and_back(mesh, form, counts)
        return mesh.record.by_purpose[ROWS]

    one_way = all_to_all(shape, form, shape.tensor * 4 * 4 * size)
    assert one_way.messages == messages
    assert set(on_threads(shape, run)) == {one_way.plus(one_way)}


def test_exchange_is_chosen_by_the_cost_of_messages_and_bytes():
    slow_start = MeshCosts(LinkCosts(1e-6, 1e-11), LinkCosts(5e-5, 1e-10))
    no_start = MeshCosts(LinkCosts(0.0, 1e-10), LinkCosts(0.0, 1e-10))
    nodes = MeshShape(expert=64, node_ranks=8)
    assert cheapest(nodes, slow_start, 1e4) is HIERARCHICAL
    assert cheapest(nodes, no_start, 1e8) is FLAT  # rows that go twice cost twice
    assert cheapest(MeshShape(expert=8, tensor=8, node_ranks=8), slow_start, 1e4) is COORDINATED
    assert cheapest(MeshShape(), slow_start, 1e4) is ExchangeForm.LOCAL
    two_nodes, dear_calls = MeshShape(expert=16, node_ranks=8), replace(slow_start, call_s=1e-3)
    assert cheapest(two_nodes, slow_start, 1e4) is HIERARCHICAL
    assert cheapest(two_nodes, dear_calls, 1e4) is FLAT  # two all-to-alls cost twice
