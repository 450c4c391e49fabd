"""The plan of what is shared: every tensor in exactly one place, whatever experts there are."""

from hypothesis import given
from hypothesis import strategies as st

from experts.packed.sharing import SHARED_MINIMUM_BYTES, TensorKey, plan_sharing


def key(name, content, size_bytes=SHARED_MINIMUM_BYTES):
    return TensorKey(name, "uint8", (size_bytes,), (1,), content)


contents = st.dictionaries(
    st.sampled_from(["stem", "body", "neck", "head"]),
    st.tuples(st.sampled_from(["x", "y"]), st.sampled_from([1000, SHARED_MINIMUM_BYTES // 2, SHARED_MINIMUM_BYTES])),
)
lines = st.dictionaries(st.sampled_from("abcdef"), contents).map(
    lambda line: {
        expert: tuple(key(name, content, size) for name, (content, size) in held.items())
        for expert, held in line.items()
    }
)


@given(lines)
def test_every_tensor_has_exactly_one_place(line):
    for expert, partition in plan_sharing(line).items():
        placed = [*partition.own, *(key for group in partition.shared for key in group)]
        assert sorted(placed, key=repr) == sorted(line[expert], key=repr)


@given(lines)
def test_a_group_is_held_whole_by_each_of_its_holders_and_by_nobody_else(line):
    plan = plan_sharing(line)
    for group in {group for partition in plan.values() for group in partition.shared}:
        holders = {expert for expert, partition in plan.items() if group in partition.shared}
        assert len(holders) > 1
        assert all(holders == {expert for expert, keys in line.items() if key in keys} for key in group)
        assert sum(key.size_bytes for key in group) >= SHARED_MINIMUM_BYTES


@given(lines, st.randoms())
def test_the_order_of_the_experts_does_not_matter(line, random):
    shuffled = list(line.items())
    random.shuffle(shuffled)
    assert plan_sharing(dict(shuffled)) == plan_sharing(line)
