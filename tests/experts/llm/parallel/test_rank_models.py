"""A model over ranks against the same model in one process, over gloo."""

import pytest
import torch

from experts.llm.arenas.extents import ModelKeyValues
from experts.llm.model import load_model
from experts.llm.parallel.costs import ExchangeForm
from experts.llm.parallel.groups import Mesh
from experts.llm.parallel.rank_model import load_rank
from experts.llm.parallel.shape import MeshShape
from experts.llm.token_batch import Chunk, TokenBatch
from tests.experts.llm.conftest import ModelFiles, greedy

LAYOUTS = {
    "mixtral": {},
    "mixtral, 3 experts": {"family": "mixtral", "num_local_experts": 3},
    "qwen3_moe": {},
    "olmoe": {},
    "olmoe, few keys": {"family": "olmoe", "num_key_value_heads": 1},
    "pr_moe": {"num_experts": [0, 4, 6]},
    "pr_moe, added": {"family": "pr_moe", "num_experts": [2, 0, 9], "residual": "add", "mlp": "swiglu"},
}
FLAT, HIERARCHICAL, COORDINATED = ExchangeForm.FLAT, ExchangeForm.HIERARCHICAL, ExchangeForm.COORDINATED
FAST = [(MeshShape(expert=2, tensor=2), COORDINATED), (MeshShape(expert=4, node_ranks=2), HIERARCHICAL)]
MESHES = [
    (MeshShape(expert=2), FLAT),
    (MeshShape(tensor=2), COORDINATED),
    (MeshShape(tensor=2, slices_experts=True), COORDINATED),
    (MeshShape(expert=2, tensor=2), FLAT),
    (MeshShape(expert=2, tensor=2, slices_experts=True), COORDINATED),
    (MeshShape(expert=4), FLAT),
    (MeshShape(data=2, expert=2), FLAT),
    (MeshShape(expert=4, tensor=2, node_ranks=4), HIERARCHICAL),
    (MeshShape(expert=4, tensor=2), COORDINATED),
    (MeshShape(expert=4, tensor=2, slices_experts=True), FLAT),
    (MeshShape(data=2, expert=2, tensor=2), COORDINATED),
]
PROMPTS = [[7, 3, 44], [5], [90, 2, 17, 8, 61, 30, 4], [33, 12]]
NEW_TOKENS = 4


def run_rank(directory, shape, form, groups):
    """Greedy tokens and logits of this rank's prompts: ``groups`` names each prompt's tensor group."""
    mesh = Mesh(shape)
    model = load_rank(directory, "tiny", mesh)
    model.exchange_by(form)
    key_values = ModelKeyValues(model.spec, model.dtype)
    own = [n for n, group in enumerate(groups) if group == mesh.group_number]
    chunks = [Chunk(n, 0, PROMPTS[n]) for n in own]
    tokens, steps = {n: [] for n in own}, []
    for _ in range(NEW_TOKENS):
        batch = TokenBatch.of(chunks) if chunks else None
        hidden = model.hidden(batch, key_values)
        if batch is None:
            continue
        steps.append(model.logits(hidden[batch.last]))
        best = steps[-1].argmax(dim=-1).tolist()
        chunks = [Chunk(one.sequence, one.end, [token]) for one, token in zip(chunks, best, strict=True)]
        for one, token in zip(chunks, best, strict=True):
            tokens[one.sequence].append(token)
    return tokens, torch.stack(steps).numpy() if steps else None, own


@pytest.fixture(scope="module", params=LAYOUTS)
def layout(request, tmp_path_factory):
    changes = dict(LAYOUTS[request.param])
    files = ModelFiles(tmp_path_factory.mktemp("models"))
    directory = files.write(files.config(changes.pop("family", request.param), **changes))
    return directory, greedy(load_model(directory, "tiny"), PROMPTS, NEW_TOKENS)


@pytest.mark.parametrize(
    ("shape", "form"), [*FAST, *(pytest.param(*mesh, marks=pytest.mark.slow) for mesh in MESHES)], ids=str
)
def test_ranks_give_the_logits_and_greedy_tokens_of_one_process(ranks, layout, shape, form):
    directory, (tokens, logits) = layout
    groups = [n % shape.groups for n in range(len(PROMPTS))] if shape.groups < 4 else [0, 2, 2, 1]
    results = ranks.run(shape.ranks, run_rank, directory, shape, form, groups)
    seen = set()
    for rank_tokens, rank_logits, own in results:
        for n in own:
            assert rank_tokens[n] == tokens[n]
        if own:
            assert (torch.from_numpy(rank_logits) - logits[:, own]).abs().max() <= 1e-5
        seen.update(own)
    assert seen == set(range(len(PROMPTS)))
