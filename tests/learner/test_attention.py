from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.learner.builders import policy_of
from thundersyncrl.errors import PhaseError
from thundersyncrl.learner.attention import Branch, PackPlan, Prefix, PrefixPlan
from thundersyncrl.learner.tree_attention import expand_heads

HEADS, KV_HEADS, WIDTH = 4, 2, 8


def states(num_tokens: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return query [1, H, T, D], key and value [1, N, T, D]."""
    draw = torch.Generator().manual_seed(seed)

    def random(heads: int) -> Tensor:
        return torch.randn(1, heads, num_tokens, WIDTH, generator=draw, dtype=torch.float64)

    return random(HEADS), random(KV_HEADS), random(KV_HEADS)


def written_out(query: Tensor, key: Tensor, value: Tensor, visible: Tensor, scaling: float) -> Tensor:
    """Return [1, T, H, D] attention, one head at a time, from the definition."""
    outputs = []
    for head in range(HEADS):
        of_group = head // (HEADS // KV_HEADS)
        logits = query[0, head] @ key[0, of_group].T * scaling
        weights = logits.masked_fill(~visible, float("-inf")).softmax(-1)
        outputs.append(weights @ value[0, of_group])
    return torch.stack(outputs, dim=1)[None]


def test_prefix_plan_is_causal_attention_and_keeps_keys_and_values() -> None:
    query, key, value = states(6, seed=0)
    plan = PrefixPlan()
    out = plan.attend(0, query, key, value, 0.3)
    causal = torch.ones(6, 6, dtype=torch.bool).tril()
    torch.testing.assert_close(out, written_out(query, key, value, causal, 0.3), rtol=1e-12, atol=1e-12)
    assert plan.keys_L[0] is key
    assert plan.values_L[0] is value


@pytest.mark.parametrize("lengths", [(4,), (3, 1, 5)])
@pytest.mark.parametrize("num_prefix", [0, 1, 7])
def test_branches_see_their_prefix_and_their_own_past_only(lengths: tuple[int, ...], num_prefix: int) -> None:
    total = sum(lengths)
    query, key, value = states(total, seed=1)
    branches: list[Branch] = []
    prefixes: list[tuple[Tensor, Tensor]] = []
    start = 0
    for index, length in enumerate(lengths):
        _, prefix_key, prefix_value = states(num_prefix, seed=10 + index)
        prefixes.append((prefix_key, prefix_value))
        prefix = Prefix(keys_L=(prefix_key,), values_L=(prefix_value,)) if num_prefix else None
        branches.append(Branch(start=start, end=start + length, prefix=prefix))
        start += length
    out = PackPlan(branches).attend(0, query, key, value, 0.3)
    # everything in one dense matrix, with what a branch may see written into a mask
    keys = torch.cat([*(k for k, _ in prefixes), key], dim=2)
    values = torch.cat([*(v for _, v in prefixes), value], dim=2)
    visible = torch.zeros(total, keys.shape[2], dtype=torch.bool)
    for index, branch in enumerate(branches):
        visible[branch.start : branch.end, index * num_prefix : (index + 1) * num_prefix] = True
        for token in range(branch.start, branch.end):
            own = len(lengths) * num_prefix
            visible[token, own + branch.start : own + token + 1] = True
    torch.testing.assert_close(out, written_out(query, keys, values, visible, 0.3), rtol=1e-12, atol=1e-12)


def test_query_heads_share_keys_in_blocks() -> None:
    key = torch.arange(2.0).view(1, 2, 1, 1)
    assert expand_heads(key, 6).flatten().tolist() == [0, 0, 0, 1, 1, 1]
    assert expand_heads(key, 2) is key


def test_a_forward_without_a_plan_is_refused() -> None:
    policy = policy_of()
    with pytest.raises(PhaseError, match="attention plan"):
        policy.model(input_ids=torch.tensor([[1, 2, 3]]))
