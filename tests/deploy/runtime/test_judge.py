"""AutoJudge: what a judge finds of little importance is kept, as the paper has it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.plan import Flush, Judge, Ngram, Plan, Tree
from polybasic.deploy import Chain, load_chain
from polybasic.deploy.runtime.request import Request
from polybasic.deploy.runtime.rounds.sampling import Sampling
from tests.deploy.noisy_chain import PLANS, PROMPT, write_noisy_chain

NUM_NEW_TOKENS = 40
PROMPTS = [PROMPT, [7, 2], [11, 5, 11, 5, 11, 5], [1]]
TREE = Tree(depth=2, top_k=3, rows=8)
THRESHOLDS = (0.3, 0.5, 0.7)
Rows = Callable[[list[int]], tuple[Tensor, Tensor]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, a noisy copy of it that proposes blocks, drafters, and judges."""
    return write_noisy_chain(tmp_path_factory.mktemp("judge"))


@pytest.fixture(scope="module")
def chain(folder: Path) -> Chain:
    """With caches of their own: what shares a cache reads the target's rows of what is kept."""
    return load_chain(folder, dtype="float32", sequences=4, share_caches=False)


@pytest.fixture(scope="module")
def models(folder: Path) -> list[Rows]:
    """Logits and hidden states of target and proposing member, by transformers."""
    paths = [folder.parent / name for name in ("target", "near")]
    loaded = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in paths]

    def rows_by(model: Any) -> Rows:
        read: list[Tensor] = []
        # what the last norm reads, which transformers hands out after that norm alone
        model.model.norm.register_forward_pre_hook(lambda _, given: read.append(given[0]))

        @torch.inference_mode()
        def rows(tokens: list[int]) -> tuple[Tensor, Tensor]:
            logits = model(torch.tensor([tokens])).logits[0]
            states = read.pop()[0]
            return logits, states / states.square().mean(-1, keepdim=True).sqrt()

        return rows

    return [rows_by(model) for model in loaded]


@pytest.fixture(scope="module")
def weight(chain: Chain) -> Tensor:
    """Of a judge that is as likely to keep a token as not."""
    width = sum(decoder.config.hidden_size for decoder in chain.engine.models.decoders.values())
    return torch.randn(width, generator=torch.Generator().manual_seed(3)) / width**0.5


def written(folder: Path, name: str, weight: Tensor, bias: float = 0.0) -> str:
    path = folder / f"{name}.safetensors"
    save_file({"weight": weight, "bias": torch.tensor([bias])}, path)
    return str(path)


def judged(file: str, threshold: float = 0.5, length: int = 6, *drafter: str) -> Plan:
    return Plan(
        members=("target", "near", *drafter),
        tree=TREE,
        flush={"target": Flush(length=length)},
        lossy=Judge(file=file, threshold=threshold),
    )


def by_the_paper(
    models: list[Rows], weight: Tensor, plan: Plan, prompt: list[int]
) -> tuple[list[int], int, int]:
    """New tokens, how many of them are not the target's own, and how many were judged."""
    (target, small), rule = models, plan.lossy
    assert isinstance(rule, Judge)
    answer, strange, num_judged = [int(target(prompt)[0][-1].argmax())], 0, 0
    while (left := NUM_NEW_TOKENS - len(answer)) > 0:
        before, block = prompt + answer, list[int]()
        while len(block) < min(plan.flush["target"].length, left - 1):
            block.append(int(small(before + block)[0][-1].argmax()))
        first = len(before)
        logits, ours = target(before + block)
        own, theirs = logits[first - 1 :].argmax(-1).tolist(), small(before + block)[1]
        kept = 0
        while kept < len(block):
            if block[kept] != own[kept]:
                features = torch.cat([ours[first + kept], theirs[first + kept - 1]])
                num_judged += 1
                if float((weight @ features).sigmoid()) >= rule.threshold:
                    break
                strange += 1
            kept += 1
        answer += [*block[:kept], own[kept]]
    return answer, strange, num_judged


def answered(chain: Chain, plan: Plan, prompt: list[int]) -> tuple[list[int], Any]:
    stream = chain.engine.run(Request(prompt, NUM_NEW_TOKENS, Sampling(0.0), frozenset(), plan))
    return [token for tokens in stream for token in tokens], stream.statistics


def test_answers_are_those_of_the_paper(
    folder: Path, chain: Chain, models: list[Rows], weight: Tensor
) -> None:
    file, kept, asked = written(folder, "any", weight), 0, 0
    for threshold in THRESHOLDS:
        for length in (3, 8):
            plan = judged(file, threshold, length)
            for prompt in PROMPTS:
                expected, strange, num_judged = by_the_paper(models, weight, plan, prompt)
                tokens, statistics = answered(chain, plan, prompt)
                assert (tokens, statistics.num_tolerated) == (expected, strange)
                kept, asked = kept + strange, asked + num_judged
    assert 0.1 * asked < kept < 0.9 * asked


def test_a_judge_of_one_mind_keeps_nothing_or_all_that_it_is_asked_about(
    folder: Path, chain: Chain, weight: Tensor
) -> None:
    strict = judged(written(folder, "strict", 0 * weight, 50.0))
    tokens, statistics = answered(chain, strict, PROMPT)
    assert tokens == answered(chain, PLANS["two"], PROMPT)[0]
    assert statistics.num_tolerated == 0
    assert not statistics.is_lossless
    adaptive = strict.model_copy(update={"flush": PLANS["adaptive"].flush})
    assert answered(chain, adaptive, PROMPT)[0] == tokens
    easy = judged(written(folder, "easy", 0 * weight, -50.0), 0.5, 5)
    others, statistics = answered(chain, easy, PROMPT)
    assert others != tokens
    assert statistics.num_tolerated > 0
    assert set(statistics.accepted_lengths["target"][:-1]) == {6}
    # the least threshold keeps the target's own alone, whatever the judge says
    least = judged(written(folder, "easy", 0 * weight, -1e9), 0.0)
    assert answered(chain, least, PROMPT)[0] == tokens


def test_drafts_below_the_proposing_member_change_no_text(
    folder: Path, chain: Chain, weight: Tensor
) -> None:
    file = written(folder, "any", weight)
    plans = [judged(file), judged(file, 0.5, 6, "copy")]
    plans.append(plans[0].model_copy(update={"ngram": Ngram(min_match=1)}))
    for prompt in PROMPTS:
        # a round below may gain more than the block had room for, hence the same length alone
        lone, drafted, copied = (answered(chain, plan, prompt) for plan in plans)
        for tokens, statistics in (lone, drafted, copied):
            assert statistics.num_tolerated <= len(tokens)
        assert lone[1].forward_passes["near"] > drafted[1].forward_passes["near"]


@pytest.mark.parametrize("kernels", ["device", "eager"])
def test_other_kernels_give_the_same(
    folder: Path, chain: Chain, weight: Tensor, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = judged(written(folder, "any", weight))
    monkeypatch.setenv("POLYBASIC_KERNELS", kernels)
    other = load_chain(folder, dtype="float32", plan=plan, share_caches=False)
    for prompt in PROMPTS[:2]:
        assert answered(other, plan, prompt)[0] == answered(chain, plan, prompt)[0]


def test_answers_at_a_time_and_traces_are_the_same(
    folder: Path, chain: Chain, weight: Tensor
) -> None:
    file = written(folder, "any", weight)
    plans = [judged(file), PLANS["coupled"], judged(file, 0.7, 3)]
    alone = [answered(chain, plan, PROMPT)[0] for plan in plans]
    options: dict[str, Any] = {"max_new_tokens": NUM_NEW_TOKENS, "ignore_eos": True}
    options["temperature"] = 0.0
    running = [chain.begin(PROMPT, plan=plan, **options) for plan in plans]
    while chain.step():
        pass
    together = [[id for piece in each.take() for id in piece.token_ids] for each in running]
    assert together == alone
    assert chain.trace(PROMPT, plan=plans[0], **options).token_ids == alone[0]


def test_judges_of_other_models_and_other_files_are_refused(
    folder: Path, chain: Chain, weight: Tensor
) -> None:
    for file, told in (
        (
            written(folder, "short", weight[1:]),
            "the judge was trained for other models: .* weights",
        ),
        (str(folder / "none.safetensors"), "judge not found: .*none.safetensors"),
        (str(folder / "chain.json"), "file is no judge: .*chain.json"),
        (written(folder, "nan", weight * float("nan")), "file is no judge: .*not finite"),
        (written(folder, "square", weight[None]), r"file is no judge: .*weight \[1, "),
    ):
        with pytest.raises(UserError, match=told):
            chain.generate(PROMPT, plan=judged(file), temperature=0.0, max_new_tokens=20)
