"""A loaded chain: same answers as transformers, same law when sampling, refusals, statistics."""

import itertools
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from polybasic.chain.errors import UserError
from polybasic.chain.loading import load_decoder
from polybasic.chain.manifest import Plan, Tree
from polybasic.deploy import Chain, load_chain
from polybasic.deploy.engine import Engine, Models, Request
from polybasic.deploy.sampling import Sampling, warp

MEMBER_SETS = [("target",), ("target", "draft"), ("target", "intermediate", "draft")]
PROMPTS = [[7], [5, 9, 2, 40], list(range(3, 40)), [1, 1, 1, 1, 1, 1, 1]]


@pytest.fixture
def chain(tiny_chain: Path) -> Chain:
    return load_chain(tiny_chain, dtype="float32")


@pytest.fixture
def model(tiny_chain: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_chain / "target", dtype=torch.float32).eval()


def continue_ids(chain: Chain, ids: list[int], num: int, **settings: Any) -> list[int]:
    members = settings.pop("members", None)
    pieces = chain.stream_ids(ids, num, Sampling(**settings), members)
    return [token for piece in pieces for token in piece]


@torch.inference_mode()
def reference(model: Any, ids: list[int], num: int, stop: frozenset[int]) -> list[int]:
    """Greedy decoding without any cache."""
    tokens = list(ids)
    while len(tokens) < len(ids) + num and not (len(tokens) > len(ids) and tokens[-1] in stop):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(ids) :]


@pytest.mark.parametrize("members", MEMBER_SETS, ids=len)
@pytest.mark.parametrize("ids", PROMPTS, ids=len)
def test_greedy_equals_transformers(
    chain: Chain, model: Any, ids: list[int], members: tuple[str, ...]
) -> None:
    expected = reference(model, ids, 50, chain.stop_tokens)
    assert continue_ids(chain, ids, 50, members=members) == expected


@pytest.mark.parametrize("members", MEMBER_SETS, ids=len)
def test_ends_at_a_stop_token(chain: Chain, model: Any, members: tuple[str, ...]) -> None:
    free = reference(model, [5, 9], 40, frozenset())
    chain.stop_tokens = frozenset({free[17]})
    expected = free[: free.index(free[17]) + 1]
    assert continue_ids(chain, [5, 9], 40, members=members) == expected
    assert chain.last_statistics is not None
    assert chain.last_statistics.stopped_by == "stop"


def test_all_lengths_are_exact(chain: Chain) -> None:
    """A round near the end may not bring more than was asked for."""
    whole = continue_ids(chain, [5, 9, 2], 20)
    for num in range(1, 20):
        assert continue_ids(chain, [5, 9, 2], num) == whole[:num]


def test_an_intermediate_of_another_shape_keeps_its_own_cache(
    chain: Chain, model: Any, tmp_path: Path
) -> None:
    target = chain.engine.models.target
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=128,
    )
    torch.manual_seed(3)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "small")
    small = load_decoder(tmp_path / "small", torch.float32, torch.device("cpu"), 200)
    plan = Plan(members=("target", "small"), tree=Tree(depth=1, top_k=1, rows=2), flush_length=4)
    engine = Engine(Models({"target": target, "small": small}, None, 128), plan)
    assert engine.verifiers["small"].cache is not engine.verifiers["target"].cache
    for ids in PROMPTS:
        request = Request(ids, 30, Sampling(), frozenset(), ("target", "small"))
        tokens = [token for new in engine.run(request) for token in new]
        assert tokens == reference(model, ids, 30, frozenset())


def joint_law(model: Any, ids: list[int], sampling: Sampling) -> dict[tuple[int, ...], float]:
    """Exact law of the next two tokens under the target."""
    law: dict[tuple[int, ...], float] = {}
    with torch.inference_mode():
        first = warp(model(torch.tensor([ids])).logits[0, -1:], sampling)[0]
        for one in first.nonzero().flatten().tolist():
            second = warp(model(torch.tensor([[*ids, one]])).logits[0, -1:], sampling)[0]
            for two in second.nonzero().flatten().tolist():
                law[one, two] = float(first[one] * second[two])
    return law


def chi_square(counts: Counter[tuple[int, ...]], law: dict[tuple[int, ...], float]) -> float:
    """Upper tail probability of Pearson's statistic; cells expected below 5 are pooled."""
    total = sum(counts.values())
    assert set(counts) <= set(law)
    rare = [cell for cell in law if law[cell] * total < 5]
    cells = [[cell] for cell in law if cell not in rare] + ([rare] if rare else [])
    statistic = 0.0
    for pooled in cells:
        expected = total * sum(law[cell] for cell in pooled)
        statistic += (sum(counts[cell] for cell in pooled) - expected) ** 2 / expected
    freedom = torch.tensor((len(cells) - 1) / 2)
    return float(torch.special.gammaincc(freedom, torch.tensor(statistic / 2)))


def sampled(chain: Chain, ids: list[int], num: int, **settings: Any) -> Counter[tuple[int, ...]]:
    return Counter(
        tuple(continue_ids(chain, ids, 4, seed=seed, **settings)[:2]) for seed in range(num)
    )


@pytest.mark.parametrize("members", MEMBER_SETS[1:], ids=len)
def test_sampled_law_is_the_targets(chain: Chain, model: Any, members: tuple[str, ...]) -> None:
    settings: dict[str, Any] = {"temperature": 1.5, "top_k": 5, "top_p": 0.95}
    chain.stop_tokens = frozenset()
    law = joint_law(model, [5, 9, 2], Sampling(**settings))
    assert math.isclose(sum(law.values()), 1, rel_tol=1e-5)
    counts = sampled(chain, [5, 9, 2], 1500, members=members, **settings)
    assert chi_square(counts, law) > 1e-3


def test_a_wrong_law_is_told_apart(chain: Chain, model: Any) -> None:
    """The control of the test above: a target that is a little too warm."""
    law = joint_law(model, [5, 9, 2], Sampling(temperature=1.5, top_k=5))
    chain.stop_tokens = frozenset()
    counts = sampled(chain, [5, 9, 2], 1500, temperature=1.9, top_k=5)
    assert chi_square(counts, law) < 1e-3


def test_seeds_reproduce(chain: Chain) -> None:
    one, same, other = (
        continue_ids(chain, [5, 9], 40, temperature=1.0, seed=seed) for seed in (1, 1, 2)
    )
    assert one == same != other


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.8, "top_p": 0.9, "seed": 3}])
def test_stream_says_what_generate_says(chain: Chain, settings: dict[str, Any]) -> None:
    messages = [{"role": "user", "content": "w5 w9 w2"}]
    whole = chain.generate(messages, max_new_tokens=40, **settings)
    pieces = list(chain.stream(messages, max_new_tokens=40, **settings))
    assert "".join(piece.text for piece in pieces) == whole.text
    assert list(itertools.chain(*(piece.token_ids for piece in pieces))) == whole.token_ids


def test_statistics_add_up(chain: Chain) -> None:
    generation = chain.generate("w5 w9 w2", max_new_tokens=40)
    statistics = generation.statistics
    assert statistics.num_tokens == len(generation.token_ids)
    assert sum(statistics.accepted_lengths["target"]) == statistics.num_tokens
    assert statistics.forward_passes["target"] == len(statistics.accepted_lengths["target"])
    assert (
        statistics.forward_passes["intermediate"]
        == len(statistics.accepted_lengths["intermediate"])
        > 0
    )
    assert statistics.forward_passes["draft"] > 0
    assert 0 < sum(statistics.seconds_by_member.values()) < statistics.seconds
    assert statistics.mean_accepted_length > 1


def test_plan_of_the_caller_wins(tiny_chain: Path) -> None:
    plan = Plan(members=("target", "draft"), tree=Tree(depth=2, top_k=3, rows=5), flush_length=3)
    chain = load_chain(tiny_chain, dtype="float32", plan=plan)
    chain.generate("w5", max_new_tokens=10)
    assert chain.last_statistics is not None
    assert set(chain.last_statistics.forward_passes) == {"target", "draft"}


def test_refusals_of_a_request(chain: Chain) -> None:
    def refuse(message: str, ids: list[int], num: int = 10, **settings: Any) -> None:
        with pytest.raises(UserError) as refusal:
            continue_ids(chain, ids, num, **settings)
        assert str(refusal.value).startswith(message)

    refuse("prompt does not fit the context: 120 prompt tokens and 10 new ones", [1] * 120)
    refuse("empty prompt: 0 tokens; give at least one token", [])
    refuse("nothing to generate: max_new_tokens=0", [1], 0)
    refuse("token outside of the vocabulary: id 64 of 64", [1, 64])
    refuse("members are not a chain: draft, target", [1], members=("draft", "target"))
    refuse("members are not a chain: intermediate", [1], members=("intermediate",))
    refuse("sampling setting out of range: temperature=-1", [1], temperature=-1)
    refuse("sampling setting out of range: top_k=0", [1], temperature=1, top_k=0)
    refuse("sampling setting out of range: top_p=1.5", [1], temperature=1, top_p=1.5)
    assert len(continue_ids(chain, [1] * 118, 10)) == 10


def test_refusals_of_loading(tiny_chain: Path) -> None:
    with pytest.raises(UserError, match="unknown dtype: dtype=int8; use one of bfloat16"):
        load_chain(tiny_chain, dtype="int8")
    with pytest.raises(UserError, match="context longer than the target's: context_tokens=129"):
        load_chain(tiny_chain, context_tokens=129)


def test_messages_without_a_template_are_refused(chain: Chain) -> None:
    chain.tokenizer.chat_template = None
    assert chain.encode("w5 w6") == [5, 6]
    with pytest.raises(UserError, match="no chat template"):
        chain.encode([{"role": "user", "content": "w5"}])
