"""What each rank holds: all of the model, each number where it belongs, and read without the rest."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from experts.errors import ModelUnsupported
from experts.llm.files.checkpoint import open_checkpoint
from experts.llm.files.config import parse_spec, read_spec
from experts.llm.files.names import assemblies
from experts.llm.parallel.shape import MeshShape, pieces_of
from experts.llm.parallel.slices import cuts_of, local_spec
from tests.experts.llm.conftest import FAMILIES, tiny_config

WHOLE_ON_EACH = ("norm", "gate", "coefficient", "bias")  # repeated by the ranks of a tensor group, or all of them


@given(st.integers(1, 4), st.integers(1, 3), st.booleans(), st.integers(1, 20), st.integers(1, 40))
def test_every_part_of_every_moe_expert_is_held_once(expert, tensor, slices, moe_experts, width):
    shape = MeshShape(expert=expert, tensor=tensor, slices_experts=slices)
    pieces = pieces_of(shape, moe_experts, width)
    for number in range(moe_experts):
        own = sorted((piece.begin, piece.end) for piece in pieces if piece.moe_expert == number)
        assert [column for begin, end in own for column in range(begin, end)] == list(range(width))
    loads = [sum(p.end - p.begin for p in pieces if p.rank == rank) for rank in range(shape.replica_ranks)]
    if moe_experts >= shape.replica_ranks and not slices:
        assert max(loads) - min(loads) <= width  # one moe_expert at most


def test_boxes_are_nodes_if_a_model_needs_several():
    assert MeshShape(expert=8).on_boxes(4).nodes == 2
    assert MeshShape(data=2, expert=4).on_boxes(4).nodes == 1
    with pytest.raises(ValueError, match="8 ranks do not fill boxes of 3"):
        MeshShape(expert=8).on_boxes(3)


@pytest.mark.parametrize("form", [0, 1])
@pytest.mark.parametrize("family", FAMILIES)
def test_slices_of_all_ranks_make_the_model(family, form, model_files):
    values = tiny_config(family)
    directory = model_files.write(values, model_files.tensors(values, form))
    spec = read_spec(directory, "tiny")
    checkpoint = open_checkpoint(directory, "tiny", spec)
    shape = MeshShape(expert=2, tensor=2)
    whole = checkpoint.read_all()
    seen = {name: torch.zeros(tensor.shape) for name, tensor in whole.items()}
    for rank in range(shape.replica_ranks):
        for name, cut in cuts_of(spec, shape, rank).items():
            part = checkpoint.read_rows(name, cut.matrix_columns, cut.rows, cut.columns)
            wanted = whole[name].reshape(-1, cut.matrix_columns)
            count = seen[name].view(-1, cut.matrix_columns)
            rows = torch.cat([torch.arange(*one) for one in cut.rows])
            assert torch.equal(part, wanted[rows, cut.columns[0] : cut.columns[1]])
            assert part.numel() == torch.Size(cut.shape).numel()
            count[rows, cut.columns[0] : cut.columns[1]] += 1
    for name, count in seen.items():
        held = set(count.flatten().tolist())
        assert len(held) == 1, name
        assert held <= (
            {1.0} if ".experts." in name else {2.0} if not any(w in name for w in WHOLE_ON_EACH) else {2.0, 4.0}
        )


def test_heads_that_ranks_do_not_divide_are_refused_by_name():
    spec = parse_spec(tiny_config("mixtral"), "tiny")
    with pytest.raises(ModelUnsupported, match=r"num_attention_heads: 4 heads, 2 of keys, cannot be cut over 3"):
        local_spec(spec, MeshShape(tensor=3), "tiny")


def test_rank_holds_its_share_only():
    spec = parse_spec(tiny_config("qwen3_moe"), "tiny")
    whole = sum(torch.Size(one.shape).numel() for one in assemblies(spec))
    shape = MeshShape(expert=2, tensor=2)
    held = [sum(torch.Size(cut.shape).numel() for cut in cuts_of(spec, shape, rank).values()) for rank in range(4)]
    assert max(held) < 0.6 * whole
