"""With native kernels a chain's greedy answers are the target's to the bit, in bfloat16, too."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from polybasic.chain.formats.checkpoints.blocks import in_8_bits
from polybasic.chain.formats.plan import Flush, Plan, Tree
from polybasic.chain.kernels.weights import Linear
from polybasic.deploy import load_chain
from polybasic.deploy.runtime.rounds.sampling import Sampling

pytestmark = pytest.mark.processor
MEMBERS = (("target",), ("target", "draft"), ("target", "intermediate", "draft"))


def answers(chain_folder: Path, plans: list[Plan]) -> list[list[int]]:
    """Of one prompt after the other, by each plan."""
    chain = load_chain(chain_folder, dtype="bfloat16", context_tokens=100)
    generator = torch.Generator().manual_seed(5)
    prompts = torch.randint(0, 60, (12, 9), generator=generator).tolist()
    return [
        [
            token
            for prompt in prompts
            for tokens in chain.stream_ids(prompt, 40, Sampling(0.0), plan)
            for token in tokens
        ]
        for plan in plans
    ]


def test_all_members_answer_as_the_target_alone(tiny_chain: Path) -> None:
    plans = [
        Plan(members=members, tree=tree, flush={"target": Flush(length=6)})
        for members in MEMBERS
        for tree in (Tree(depth=3, top_k=2, rows=6), Tree(depth=5, top_k=4, rows=20))
    ]
    expected, *others = answers(tiny_chain, plans)
    assert len(expected) > 100
    assert all(found == expected for found in others)


def test_the_projections_below_the_target_are_in_8_bits(tiny_chain: Path) -> None:
    chain = load_chain(tiny_chain, dtype="bfloat16", context_tokens=100)
    target, intermediate = (verifier.decoder for verifier in chain.engine.verifiers.values())
    states = torch.randn(5, target.config.hidden_size).bfloat16()
    weights = {
        model: weight_of(model.weights.lm_head, target.config.hidden_size)
        for model in (target, intermediate)
    }
    # the copy has the target's projection
    rounded = in_8_bits(weights[target]).dequantized()
    assert torch.allclose(rounded, weights[intermediate], rtol=1e-5, atol=1e-6)
    assert not torch.allclose(weights[target], weights[intermediate], rtol=1e-3, atol=1e-4)
    apart = (target.logits(states) - intermediate.logits(states)).abs().max()
    assert 0 < apart < 0.05 * target.logits(states).std()


def weight_of(product: Linear, num_inputs: int) -> Tensor:
    """The weight [O, I] of a product, column by column."""
    return product(torch.eye(num_inputs)).T
