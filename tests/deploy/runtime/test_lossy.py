"""Big Little Decoder: two members in turns, as the paper has it, and named lossy everywhere."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor
from transformers import AutoModelForCausalLM

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.manifest import check_plan, read_manifest
from polybasic.chain.formats.plan import (
    AdaptiveFlush,
    BigLittle,
    Flush,
    LoadPlan,
    Ngram,
    Plan,
    PredictedPlan,
    Tree,
)
from polybasic.deploy import Chain, load_chain
from polybasic.deploy.runtime.models import Models
from polybasic.deploy.runtime.remote.requests import check_remote
from polybasic.deploy.runtime.request import Request
from polybasic.deploy.runtime.rounds.sampling import Sampling
from tests.deploy.noisy_chain import PLANS, PROMPT, write_noisy_chain
from tests.deploy.serve.serving import serving

NUM_NEW_TOKENS = 40
PROMPTS = [PROMPT, [7, 2], [11, 5, 11, 5, 11, 5], [1]]
THRESHOLDS = [(0.02, 3.0), (0.05, 2.0), (0.1, 4.0), (0.0, 2.5), (0.04, 0.0)]
TREE = Tree(depth=2, top_k=3, rows=8)
Logits = Callable[[list[int]], Tensor]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, a noisy copy of it that proposes blocks, and drafters."""
    return write_noisy_chain(tmp_path_factory.mktemp("lossy"))


@pytest.fixture(scope="module")
def chain(folder: Path) -> Chain:
    """With caches of their own: what shares a cache reads the target's rows of what is kept."""
    return load_chain(folder, dtype="float32", sequences=4, share_caches=False)


@pytest.fixture(scope="module")
def models(folder: Path) -> list[Logits]:
    """Target and little member, by transformers."""
    paths = [folder.parent / name for name in ("target", "near")]
    loaded = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in paths]

    def logits_by(model: Any) -> Logits:
        @torch.inference_mode()
        def logits(tokens: list[int]) -> Tensor:
            return model(torch.tensor([tokens])).logits[0]  # type: ignore[no-any-return]

        return logits

    return [logits_by(model) for model in loaded]


def lossy(fallback: float, rollback: float, length: int = 100, *drafter: str) -> Plan:
    return Plan(
        members=("target", "near", *drafter),
        tree=TREE,
        flush={"target": Flush(length=length)},
        lossy=BigLittle(fallback_threshold=fallback, rollback_threshold=rollback),
    )


def by_the_paper(models: list[Logits], plan: Plan, prompt: list[int]) -> tuple[list[int], int]:
    """New tokens, and how many of them are not the target's own."""
    (target, little), rule = models, plan.lossy
    assert rule is not None
    answer, strange = [int(target(prompt)[-1].argmax())], 0
    while (left := NUM_NEW_TOKENS - len(answer)) > 0:
        before, block = prompt + answer, list[int]()
        while len(block) < min(plan.flush["target"].length, left - 1):
            row = little(before + block)[-1].softmax(-1)
            if row.max() < rule.fallback_threshold:
                break
            block.append(int(row.argmax()))
        rows = target(before + block)[len(before) - 1 :]
        own, log_p = rows.argmax(-1).tolist(), rows.log_softmax(-1)
        kept = 0
        while kept < len(block):
            distance = -float(log_p[kept, block[kept]])
            if block[kept] != own[kept] and not distance <= rule.rollback_threshold:
                break
            strange += block[kept] != own[kept]
            kept += 1
        answer += [*block[:kept], own[kept]]
    return answer, strange


def answered(chain: Chain, plan: Plan, prompt: list[int]) -> tuple[list[int], Any]:
    stream = chain.engine.run(Request(prompt, NUM_NEW_TOKENS, Sampling(0.0), frozenset(), plan))
    return [token for tokens in stream for token in tokens], stream.statistics


@pytest.mark.parametrize(("fallback", "rollback"), THRESHOLDS)
def test_answers_are_those_of_the_paper(
    chain: Chain, models: list[Logits], fallback: float, rollback: float
) -> None:
    for length in (3, 100):
        plan, strange = lossy(fallback, rollback, length), 0
        for prompt in PROMPTS:
            expected, num_strange = by_the_paper(models, plan, prompt)
            tokens, statistics = answered(chain, plan, prompt)
            assert (tokens, statistics.num_tolerated) == (expected, num_strange)
            strange += num_strange
        # the rule that keeps only the target's own is the one that keeps nothing else
        assert (strange > 0) == (rollback > 0)


def test_drafts_below_the_little_member_change_no_text(chain: Chain) -> None:
    plans = [lossy(0.03, 3.0), lossy(0.03, 3.0, 100, "copy")]
    plans.append(plans[0].model_copy(update={"ngram": Ngram(min_match=1)}))
    for prompt in PROMPTS:
        first, *others = (answered(chain, plan, prompt) for plan in plans)
        for tokens, statistics in others:
            assert tokens == first[0]
            assert statistics.num_tolerated == first[1].num_tolerated
            passes = statistics.forward_passes
            assert passes["target"] == first[1].forward_passes["target"]
    drafted = answered(chain, plans[1], PROMPT)[1].forward_passes["near"]
    assert drafted < answered(chain, plans[0], PROMPT)[1].forward_passes["near"]


def test_extreme_thresholds_leave_one_member(chain: Chain, models: list[Logits]) -> None:
    target, little = models

    def greedy(model: Logits, tokens: list[int]) -> list[int]:
        for _ in range(NUM_NEW_TOKENS - len(tokens)):
            tokens = [*tokens, int(model(PROMPT + tokens)[-1].argmax())]
        return tokens

    own = greedy(target, [])
    assert answered(chain, lossy(0.0, 0.0), PROMPT)[0] == own
    tokens, statistics = answered(chain, lossy(1.0, 1e6), PROMPT)
    assert tokens == own
    assert statistics.forward_passes["target"] == NUM_NEW_TOKENS - 1
    # all is kept: the target draws the first token and the last one alone
    tokens, statistics = answered(chain, lossy(0.0, 1e6), PROMPT)
    assert tokens[:-1] == greedy(little, own[:1])[:-1] != own[:-1]
    assert statistics.forward_passes["target"] == 1
    assert statistics.num_tolerated > 0


def test_answers_at_a_time_keep_to_their_plans(chain: Chain) -> None:
    plans = [lossy(0.05, 2.0), PLANS["coupled"], lossy(0.02, 3.0, 3), lossy(0.0, 1e6)]
    alone = [answered(chain, plan, PROMPT)[0] for plan in plans]
    assert len({tuple(tokens) for tokens in alone}) > 2
    options = {"max_new_tokens": NUM_NEW_TOKENS, "ignore_eos": True, "temperature": 0.0}
    running = [chain.begin(PROMPT, plan=plan, **options) for plan in plans]  # type: ignore[arg-type]
    while chain.step():
        pass
    together = [[id for piece in each.take() for id in piece.token_ids] for each in running]
    assert together == alone


@pytest.mark.parametrize("kernels", ["device", "eager"])
def test_other_kernels_give_the_same(
    folder: Path, chain: Chain, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = lossy(0.05, 2.0, 6)
    monkeypatch.setenv("POLYBASIC_KERNELS", kernels)
    other = load_chain(folder, dtype="float32", plan=plan, share_caches=False)
    assert other.engine.captures_rounds == (kernels == "device")
    for prompt in PROMPTS[:2]:
        assert answered(other, plan, prompt)[0] == answered(chain, plan, prompt)[0]


def test_a_trace_and_log_probabilities_are_of_the_same_answer(chain: Chain) -> None:
    options: dict[str, Any] = {"max_new_tokens": 20, "temperature": 0.0, "ignore_eos": True}
    options["plan"] = lossy(0.02, 3.0)
    answer = chain.generate(PROMPT, logprobs=1, **options)
    assert answer.token_ids == chain.trace(PROMPT, **options).token_ids
    strange = sum(
        each.logprob < max(logprob for _, logprob in each.top) for each in answer.logprobs
    )
    assert strange == answer.statistics.num_tolerated > 0
    assert not answer.statistics.is_lossless
    assert chain.generate(PROMPT, max_new_tokens=2, temperature=0.0).statistics.is_lossless


def test_tokens_behind_a_stop_string_do_not_count(chain: Chain) -> None:
    options: dict[str, Any] = {"max_new_tokens": 30, "temperature": 0.0, "ignore_eos": True}
    options["plan"] = lossy(0.0, 1e6)
    whole = chain.generate(PROMPT, **options)
    words = whole.text.split()
    cut = chain.generate(PROMPT, stop=words[2], **options)
    assert cut.statistics.stopped_by == "stop_string"
    assert cut.statistics.num_tokens == 3
    assert cut.statistics.num_tolerated <= 3 < whole.statistics.num_tolerated


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"temperature": 0.7}, "a lossy plan does not draw: temperature=0.7"),
        ({"temperature": 0.0, "seed": 3}, "a seed promises the target's text"),
    ],
)
def test_what_a_lossy_plan_does_not_keep_is_not_promised(
    chain: Chain, options: dict[str, Any], told: str
) -> None:
    with pytest.raises(UserError, match=told):
        chain.generate(PROMPT, plan=lossy(0.05, 2.0), **options)
    assert chain.generate(PROMPT, max_new_tokens=2, plan=PLANS["coupled"], **options).token_ids


def test_a_remote_target_keeps_its_own_tokens_alone() -> None:
    request = Request(PROMPT, 4, Sampling(0.0), frozenset(), lossy(0.05, 2.0))
    with pytest.raises(UserError, match="lossy plan of a remote target: target"):
        check_remote(request, Models({}))


def test_chains_carry_lossless_plans(folder: Path, chain: Chain) -> None:
    plan, members = lossy(0.05, 2.0), chain.manifest.members
    for kind, more in ((PredictedPlan, {}), (LoadPlan, {"sequences": 1})):
        with pytest.raises(ValidationError, match="a chain carries lossless plans"):
            kind(plan=plan, seconds_per_token=1, **more)
    with pytest.raises(ValueError, match="needs the target and one member"):
        check_plan(plan.model_copy(update={"members": ("target", "copy")}), members)
    adaptive = AdaptiveFlush(break_even=0.5, acceptance=(0.5,) * 8)
    with pytest.raises(ValidationError, match="not by adaptive"):
        Plan(**{**dict(plan), "flush": {"target": Flush(length=3, adaptive=adaptive)}})
    path = folder / "chain.json"
    before = path.read_text("utf-8")
    try:
        content = json.loads(before)
        content.pop("sha256", None)
        path.write_text(json.dumps(content | {"plan": plan.model_dump(mode="json")}), "utf-8")
        with pytest.raises(UserError, match="a chain carries lossless plans"):
            read_manifest(folder)
    finally:
        path.write_text(before, "utf-8")
    # another set of members is run without loss
    ran = load_chain(folder, dtype="float32", plan=plan)
    assert ran.plan_of(("target",)).is_lossless
    assert ran.plan_of(plan.members).is_lossless
    assert not ran.plan.is_lossless


def test_a_server_says_that_it_is_lossy(folder: Path) -> None:
    plan = lossy(0.05, 2.0)
    chain = load_chain(folder, dtype="float32", plan=plan, sequences=4)
    asked = {"prompt": PROMPT, "max_tokens": 20, "ignore_eos": True, "temperature": 0}
    with serving(chain) as server:
        assert server.get("/v1/models").json()["data"][0]["polybasic"]["lossless"] is False
        told = server.complete(**asked)["polybasic"]
        assert told["lossless"] is False
        assert told["tolerated"] > 0
        assert told["seed"] is None
        alone = {"polybasic": {"run": ["target"]}}
        assert server.complete(**asked, **alone, seed=1)["polybasic"]["lossless"] is True
        for param, value in (("temperature", 0.5), ("seed", 7)):
            answer = server.post("/v1/completions", asked | {param: value})
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == param
        assert server.metric("lossy_answers_total") == 1
        assert server.metric("tolerated_tokens_total") == told["tolerated"]
