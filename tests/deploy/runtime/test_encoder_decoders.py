"""Chains of encoder-decoders: a target, smaller ones below it, and n-grams, as in CS Drafting."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, T5ForConditionalGeneration

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.manifest import Provenance
from polybasic.chain.formats.package import Part, package_chain
from polybasic.chain.formats.plan import Flush, Ngram, Plan, Tree, Window
from polybasic.deploy import Chain, load_chain
from polybasic.deploy.bench.systems.generate_loops import GenerateLoop, load_for_generate
from polybasic.deploy.runtime.rounds.sampling import Sampling
from tests.checkpoints import write_t5

PROMPTS = (
    "the fox is singing in the rain. why?",
    "a",
    "summarize: the sea is blue, the sea is deep, and nothing in the sea is as old as the sea",
)
NEW_TOKENS = 40
TREE = Tree(depth=3, top_k=2, rows=6)
FLUSH = {"target": Flush(length=6), "base": Flush(length=4)}
PLANS = {
    "alone": Plan(members=("target",), tree=TREE),
    "n-grams": Plan(members=("target",), tree=TREE, ngram=Ngram(min_match=1)),
    "drafted": Plan(members=("target", "draft"), tree=TREE),
    "three": Plan(members=("target", "base", "draft"), tree=TREE, flush=FLUSH),
    "cascade": Plan(
        members=("target", "base", "small"), tree=TREE, flush=FLUSH, ngram=Ngram(min_match=1)
    ),
    "four": Plan(
        members=("target", "base", "small", "draft"), tree=TREE, flush=FLUSH, ngram=Ngram()
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A chain of four: one is near the target and shares its cache, the others are smaller."""
    place = tmp_path_factory.mktemp("t5")
    write_t5(place / "target", seed=1)
    write_t5(place / "base", seed=1)
    path = place / "base" / "model.safetensors"
    generator = torch.Generator().manual_seed(5)
    stored = {
        name: weight * (1 + 0.05 * torch.randn(weight.shape, generator=generator))
        for name, weight in load_file(path).items()
    }
    save_file(stored, path, metadata={"format": "pt"})
    for seed, name in ((3, "small"), (4, "draft")):
        write_t5(place / name, seed=seed, d_model=32, num_layers=1, num_decoder_layers=1)
    parts = [
        Part("base", "intermediate", "decoder", place / "base"),
        Part("small", "intermediate", "decoder", place / "small"),
        Part("draft", "drafter", "decoder", place / "draft"),
    ]
    package_chain(
        place / "chain",
        place / "target",
        str(place / "target"),
        copy_target=True,
        parts=parts,
        plan=PLANS["three"],
        provenance=Provenance(
            recipe={"name": "t5"}, command="", package_versions={}, data_digests={}
        ),
        quality={},
        training={},
    )
    return place / "chain"


@pytest.fixture(scope="module")
def chain(folder: Path) -> Chain:
    return load_chain(folder, context_tokens=256)


@pytest.fixture(scope="module")
def answers(folder: Path) -> list[list[int]]:
    """transformers' greedy ones."""
    model = T5ForConditionalGeneration.from_pretrained(folder / "target").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder / "target")
    found = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        output = model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False)
        found.append(output[0, 1:].tolist())
    assert max(map(len, found)) == NEW_TOKENS
    return found


@pytest.mark.parametrize("name", PLANS)
def test_greedy_answers_are_transformers(chain: Chain, answers: list[list[int]], name: str) -> None:
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        found = chain.generate(prompt, max_new_tokens=NEW_TOKENS, plan=PLANS[name])
        assert found.token_ids == answer
    if name != "alone":
        assert found.statistics.forward_passes["target"] < NEW_TOKENS


def sources_read(chain: Chain, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Member and length of each source that is encoded from now on."""
    read = []
    for name, decoder in chain.engine.models.decoders.items():
        encode = decoder._read_source  # type: ignore[attr-defined]

        def counting(ids: torch.Tensor, cache: Any, name: str = name, encode: Any = encode) -> Any:
            read.append((name, len(ids)))
            return encode(ids, cache)

        monkeypatch.setattr(decoder, "_read_source", counting)
    return read


def test_a_source_is_encoded_once(chain: Chain, monkeypatch: pytest.MonkeyPatch) -> None:
    read = sources_read(chain, monkeypatch)
    chain.generate(PROMPTS[2], max_new_tokens=NEW_TOKENS, plan=PLANS["cascade"])
    # base reads the target's rows
    length = len(chain.encode(PROMPTS[2])) - 1
    assert sorted(read) == [("small", length), ("target", length)]


def answered_together(chain: Chain, plan: Plan) -> list[list[int]]:
    """Answers to all prompts at a time."""
    live = [chain.begin(prompt, max_new_tokens=NEW_TOKENS, plan=plan) for prompt in PROMPTS]
    while chain.step():
        pass
    return [[token for piece in each.take() for token in piece.token_ids] for each in live]


def test_sequences_at_a_time_answer_as_alone(chain: Chain, answers: list[list[int]]) -> None:
    assert answered_together(chain, PLANS["cascade"]) == answers


def test_a_paused_sequence_reads_its_source_again(
    folder: Path, answers: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = load_chain(folder, context_tokens=160, cache_tokens=160, sequences=3)
    read = sources_read(chain, monkeypatch)
    assert answered_together(chain, PLANS["three"]) == answers
    assert len([name for name, _ in read if name == "target"]) > len(PROMPTS)


@pytest.mark.parametrize("name", ["n-grams", "drafted", "cascade", "four"])
def test_a_seed_is_a_text_by_every_plan(chain: Chain, name: str) -> None:
    settings: Any = {"temperature": 0.9, "max_new_tokens": NEW_TOKENS}
    for seed in range(3):
        alone = chain.generate(PROMPTS[0], plan=PLANS["alone"], seed=seed, **settings)
        found = chain.generate(PROMPTS[0], plan=PLANS[name], seed=seed, **settings)
        assert found.token_ids == alone.token_ids
    assert chain.generate(PROMPTS[0], seed=7, **settings).token_ids != alone.token_ids


def test_generate_of_the_bench_answers_the_same(
    folder: Path, chain: Chain, answers: list[list[int]]
) -> None:
    model = load_for_generate(folder / "target", torch.float32, torch.device("cpu"))
    loop = GenerateLoop("hf_generate", "", model, chain.stop_tokens)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        ids = chain.encode(prompt)
        assert loop.answer(ids, NEW_TOKENS, Sampling()).token_ids == answer
        logits = loop.logits([*ids, *answer[:4]], 3)
        assert logits.argmax(-1).tolist() == answer[2:5]


def test_messages_are_their_contents(chain: Chain) -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "why?"}]
    assert chain.encode(messages) == chain.encode("be brief\n\nwhy?")
    assert chain.encode("why?")[-2:] == [chain.tokenizer.eos_token_id, 0]
    assert chain.prompt_of([5, 6]) == [5, 6, 0]
    begun = [*messages, {"role": "assistant", "content": "the sea"}]
    spelled = chain.tokenizer("the sea", add_special_tokens=False)["input_ids"]
    assert chain.encode(begun, continues=True) == [*chain.encode(messages), *spelled]
    with pytest.raises(UserError, match="no message to continue"):
        chain.encode(messages, continues=True)


def test_an_answer_goes_on_from_a_beginning(chain: Chain, answers: list[list[int]]) -> None:
    """Tokens after the start token are the decoder's, also where it is among them."""
    prompt = [*chain.encode(PROMPTS[2]), *answers[2][:10]]
    rest = chain.generate(prompt, max_new_tokens=NEW_TOKENS - 10, plan=PLANS["cascade"])
    assert rest.token_ids == answers[2][10:]


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "no start": ([5, 6, 7], {}, "no source and start token: 3 prompt tokens, the start token is 0"),
    "no source": ([0, 5], {}, "no source and start token"),
    "spelled": ("the <pad> sea", {}, "text spells the token that ends a source: token"),
    "penalty": ("the sea", {"repetition_penalty": 1.2}, "source: repetition_penalty=1.2; leave"),
    "prompt": ("the sea", {"prompt_logprobs": 1}, "source: prompt_logprobs; leave it out"),
    "window": (
        "the sea",
        {"plan": PLANS["three"].model_copy(update={"windows": {"base": Window(tokens=64)}})},
        "source: windows of the plan",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_requests_that_mean_nothing_over_a_source(chain: Chain, case: str) -> None:
    prompt, options, message = REFUSED[case]
    with pytest.raises(UserError, match=message):
        chain.generate(prompt, max_new_tokens=4, **options)


@pytest.mark.parametrize("option", [{"tensor_parallel": 2}, {"reuses": True}])
def test_options_that_sources_do_not_allow(folder: Path, option: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="unsupported of encoder-decoders"):
        load_chain(folder, **option)


def test_members_begin_with_one_token(folder: Path, tmp_path: Path) -> None:
    write_t5(tmp_path / "other", decoder_start_token_id=3)
    part = Part("other", "intermediate", "decoder", tmp_path / "other")
    provenance = Provenance(recipe={}, command="", package_versions={}, data_digests={})
    given = (
        folder / "target",
        str(folder / "target"),
        True,
        [part],
        PLANS["alone"],
        provenance,
        {},
        {},
    )
    with pytest.raises(UserError, match="members read prompts in different ways: start token 3"):
        package_chain(tmp_path / "chain", *given)
