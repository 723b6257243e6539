"""Names of requests: expansion, exact resolution, release."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.core.errors import BadRequest
from rollout.tokenizer_manager.in_flight import RidRegistry
from rollout.tokenizer_manager.request import GenerateReqInput, expand, sample_rids

NAMES = st.sampled_from(["a", "b", "a_0", "a_1", "a_0_0", "b_0"])


def _request(rid: str | list[str], size: int, n: int) -> GenerateReqInput:
    """Build a request of `size` prompts; `size` 0 makes a single prompt without a list."""
    return GenerateReqInput(input_ids=[[1]] * size if size else [1], rid=rid, sampling_params={"n": n})


REQUESTS = st.one_of(
    st.builds(_request, NAMES, st.integers(0, 3), st.integers(1, 3)),
    st.builds(
        lambda rids, n: _request(rids, len(rids), n),
        st.lists(NAMES, min_size=1, max_size=3, unique=True),
        st.integers(1, 2),
    ),
)


@pytest.mark.parametrize(
    ("request_", "leaves"),
    [
        (GenerateReqInput(input_ids=[1], rid="r"), ["r"]),
        (GenerateReqInput(input_ids=[[1]], rid="r"), ["r_0"]),
        (GenerateReqInput(input_ids=[1], rid="r", sampling_params={"n": 2}), ["r_0", "r_1"]),
        (
            GenerateReqInput(input_ids=[[1], [2]], rid="r", sampling_params={"n": 2}),
            ["r_0_0", "r_0_1", "r_1_0", "r_1_1"],
        ),
        (GenerateReqInput(input_ids=[[1], [2]], rid=["x", "y"]), ["x", "y"]),
    ],
)
def test_each_sample_is_named_after_its_request(request_: GenerateReqInput, leaves: list[str]) -> None:
    assert [rid for message in expand(request_).messages for rid in sample_rids(message)] == leaves


@given(st.lists(st.one_of(REQUESTS, st.integers(0, 20)), max_size=12))
def test_names_are_unique_while_in_use_and_gone_afterwards(actions: list[GenerateReqInput | int]) -> None:
    """An integer releases one sample in use; a request takes its names or, if it cannot, takes none."""
    registry = RidRegistry()
    in_use: list[str] = []
    groups: dict[str, set[str]] = {}
    for action in actions:
        if isinstance(action, int):
            if in_use:
                leaf = in_use.pop(action % len(in_use))
                registry.release([leaf])
                groups = {name: members - {leaf} for name, members in groups.items() if members - {leaf}}
        else:
            expanded = expand(action)
            leaves = [rid for message in expanded.messages for rid in sample_rids(message)]
            new: dict[str, set[str]] = {}
            for own, message in zip(expanded.names, expanded.messages, strict=True):
                names = [expanded.rid] + ([own] if message.sampling_params.n > 1 else [])
                for name in filter(None, names):
                    new.setdefault(name, set()).update(sample_rids(message))
            taken = set(in_use) | set(groups)
            clash = len(set(leaves)) < len(leaves) or set(leaves) & set(new) or (set(leaves) | set(new)) & taken
            if clash:
                with pytest.raises(BadRequest):
                    registry.reserve(expanded)
            else:
                registry.reserve(expanded)
                in_use += leaves
                groups |= new
        assert sorted(registry.leaves()) == sorted(in_use)
        for name in {"a", "b", "a_0", "a_1", "a_0_0", "b_0", "a_", ""}:
            expected = sorted(groups[name]) if name in groups else [name] if name in in_use else []
            assert registry.resolve(name) == expected
    registry.release(list(in_use))
    assert registry.leaves() == [] and registry._members == {}
