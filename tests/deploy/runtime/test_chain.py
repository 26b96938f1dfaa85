"""A loaded chain: same answers as transformers, same law when sampling, refusals, statistics."""

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.card import record_plan
from polybasic.chain.formats.files import read_json, write_json
from polybasic.chain.formats.manifest import read_manifest, write_manifest
from polybasic.chain.formats.plan import (
    Flush,
    LoadPlan,
    MeasuredPlan,
    Ngram,
    Plan,
    PredictedPlan,
    Tree,
)
from polybasic.chain.formats.verify import check_chain
from polybasic.deploy import Chain, load_chain
from polybasic.deploy.runtime.hardware import hardware_name
from polybasic.deploy.runtime.rounds.sampling import Sampling
from polybasic.deploy.runtime.rounds.warping import Prefixes, process_logits

MEMBER_SETS = [("target",), ("target", "draft"), ("target", "intermediate", "draft")]
FOUR_CHAIN_MEMBER_SETS = [
    ("target", "small", "small_draft"),
    ("target", "intermediate", "small", "small_draft"),
]
PENALTIES = {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.3}
PROMPTS = [[7], [5, 9, 2, 40], list(range(3, 40)), [1, 1, 1, 1, 1, 1, 1]]


@pytest.fixture
def chain(tiny_chain: Path) -> Chain:
    return load_chain(tiny_chain, dtype="float32")


@pytest.fixture
def model(tiny_chain: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_chain / "target", dtype=torch.float32).eval()


def continue_ids(chain: Chain, ids: list[int], num: int, **settings: Any) -> list[int]:
    members = settings.pop("members", chain.plan.members)
    pieces = chain.stream_ids(ids, num, Sampling(**settings), chain.plan_of(members))
    return [token for piece in pieces for token in piece]


@torch.inference_mode()
def reference(
    model: Any, ids: list[int], num: int, stop: frozenset[int], **settings: Any
) -> list[int]:
    """Greedy decoding without any cache."""
    tokens, sampling = list(ids), Sampling(**settings)
    while len(tokens) < len(ids) + num and not (len(tokens) > len(ids) and tokens[-1] in stop):
        logits = model(torch.tensor([tokens])).logits[0, -1:]
        logits = process_logits(logits, sampling, Prefixes(tokens, [[]]), len(ids))
        tokens.append(int(logits.argmax()))
    return tokens[len(ids) :]


@pytest.mark.parametrize("members", MEMBER_SETS, ids=len)
@pytest.mark.parametrize("ids", PROMPTS, ids=len)
def test_greedy_equals_transformers(
    chain: Chain, model: Any, ids: list[int], members: tuple[str, ...]
) -> None:
    expected = reference(model, ids, 50, chain.stop_tokens)
    assert continue_ids(chain, ids, 50, members=members) == expected


@pytest.mark.parametrize("members", MEMBER_SETS, ids=len)
def test_greedy_with_penalties_and_bias_is_lossless(
    chain: Chain, model: Any, members: tuple[str, ...]
) -> None:
    settings: dict[str, Any] = {**PENALTIES, "logit_bias": {11: 2.0, 63: -100.0}}
    expected = reference(model, [5, 9, 2], 50, chain.stop_tokens, **settings)
    assert continue_ids(chain, [5, 9, 2], 50, members=members, **settings) == expected
    assert expected != reference(model, [5, 9, 2], 50, chain.stop_tokens)


@pytest.mark.parametrize("members", FOUR_CHAIN_MEMBER_SETS, ids=len)
@pytest.mark.parametrize("settings", [{}, PENALTIES], ids=["plain", "penalties"])
def test_chains_of_members_of_other_shapes_are_lossless(
    tiny_four_chain: Path, members: tuple[str, ...], settings: dict[str, Any]
) -> None:
    chain = load_chain(tiny_four_chain, dtype="float32")
    model = AutoModelForCausalLM.from_pretrained(
        tiny_four_chain / "target", dtype=torch.float32
    ).eval()
    caches = {name: verifier.cache for name, verifier in chain.engine.verifiers.items()}
    assert caches["target"] is caches["intermediate"]
    assert caches["target"] is not caches["small"]
    for ids in PROMPTS:
        expected = reference(model, ids, 40, chain.stop_tokens, **settings)
        assert continue_ids(chain, ids, 40, members=members, **settings) == expected


@pytest.mark.parametrize("members", MEMBER_SETS, ids=len)
def test_ends_at_a_stop_token(chain: Chain, model: Any, members: tuple[str, ...]) -> None:
    free = reference(model, [5, 9], 40, frozenset())
    chain.stop_tokens = frozenset({free[17]})
    expected = free[: free.index(free[17]) + 1]
    answer = chain.stream_ids([5, 9], 40, Sampling(), chain.plan_of(members))
    with pytest.raises(UserError, match="no statistics: an answer that has not ended; take all"):
        _ = answer.statistics
    assert [token for new in answer for token in new] == expected
    assert answer.statistics.stopped_by == "stop"
    assert list(answer) == []
    assert answer.statistics.num_tokens == len(expected)


def test_all_lengths_are_exact(chain: Chain) -> None:
    """A round near the end may not bring more than was asked for."""
    whole = continue_ids(chain, [5, 9, 2], 20)
    for num in range(1, 20):
        assert continue_ids(chain, [5, 9, 2], num) == whole[:num]


@pytest.mark.parametrize("members", MEMBER_SETS, ids=len)
def test_seeds_reproduce(tiny_chain: Path, members: tuple[str, ...]) -> None:
    loaded, same = (load_chain(tiny_chain, dtype="float32") for _ in range(2))
    settings: dict[str, Any] = {"temperature": 1.0, "members": members}
    expected = continue_ids(loaded, [5, 9], 40, seed=1, **settings)
    assert expected == continue_ids(loaded, [5, 9], 40, seed=1, **settings)
    assert expected == continue_ids(same, [5, 9], 40, seed=1, **settings)
    assert expected != continue_ids(loaded, [5, 9], 40, seed=2, **settings)


@pytest.mark.parametrize(
    "settings",
    [{}, {"temperature": 0.8, "top_p": 0.9, "seed": 3}, {"stop": "w1"}, {"stop": ["w9", " w3"]}],
    ids=str,
)
def test_stream_says_what_generate_says(chain: Chain, settings: dict[str, Any]) -> None:
    messages = [{"role": "user", "content": "w5 w9 w2"}]
    whole = chain.generate(messages, max_new_tokens=40, **settings)
    pieces = list(chain.stream(messages, max_new_tokens=40, **settings))
    assert "".join(piece.text for piece in pieces) == whole.text
    assert list(itertools.chain(*(piece.token_ids for piece in pieces))) == whole.token_ids
    if "stop" not in settings:
        assert whole.text == chain.tokenizer.decode(whole.token_ids, skip_special_tokens=True)


@pytest.mark.parametrize("members", MEMBER_SETS, ids=len)
def test_a_stop_string_ends_text_and_tokens(chain: Chain, members: tuple[str, ...]) -> None:
    chain.stop_tokens = frozenset()
    free = chain.generate("w5 w9 w2", max_new_tokens=40, members=members)
    assert free.statistics.stopped_by == "length"
    words = free.text.split()
    stop = f"{words[7]} {words[8]}"
    position = free.text.index(stop)
    num_tokens = len(free.text[: position + len(stop)].split())
    cut = chain.generate("w5 w9 w2", max_new_tokens=40, members=members, stop=[stop, "never"])
    assert cut.text == free.text[:position]
    assert cut.token_ids == free.token_ids[:num_tokens]
    assert cut.statistics.stopped_by == "stop_string"
    assert cut.statistics.num_tokens == num_tokens
    pieces = chain.stream_ids([5, 9, 2], 40, Sampling(), chain.plan_of(members), stop)
    assert [token for new in pieces for token in new] == cut.token_ids


def test_a_special_token_may_be_named_as_a_stop_string(chain: Chain, model: Any) -> None:
    chain.stop_tokens = frozenset()
    eos = chain.tokenizer.eos_token_id
    ids, bias = [5, 9, 2], {eos: 2.5}
    free = reference(model, ids, 60, frozenset(), logit_bias=bias)
    assert eos in free
    answer = chain.generate("w5 w9 w2", max_new_tokens=60, stop="<eos>", logit_bias=bias)
    assert answer.token_ids == free[: free.index(eos) + 1]
    assert "<eos>" not in answer.text
    assert answer.statistics.stopped_by == "stop"


def package_with_defaults(parts: Any, out: Path, defaults: dict[str, Any]) -> Path:
    path = parts.target / "generation_config.json"
    write_json(path, {**read_json(path, "generation config"), **defaults})
    parts.package(out)
    return out


def test_the_checkpoints_sampling_is_the_default(tiny_chain_parts: Any, tmp_path: Path) -> None:
    defaults = {"do_sample": True, "temperature": 0.7, "top_k": 9, "repetition_penalty": 1.2}
    folder = package_with_defaults(tiny_chain_parts, tmp_path / "chain", defaults)
    chain = load_chain(folder, dtype="float32")
    assert chain.default_sampling == Sampling(0.7, 9, repetition_penalty=1.2)

    def drawn(**settings: Any) -> list[int]:
        return chain.generate("w5 w9", max_new_tokens=40, seed=4, **settings).token_ids

    explicit: dict[str, Any] = {"temperature": 0.7, "top_k": 9, "repetition_penalty": 1.2}
    assert drawn() == drawn(**explicit) == continue_ids(chain, [5, 9], 40, seed=4, **explicit)
    assert drawn() != drawn(top_k=0, repetition_penalty=1.0)
    neutral = drawn(temperature=0, repetition_penalty=1.0)
    assert neutral == continue_ids(chain, [5, 9], 40)
    assert drawn(temperature=0) == continue_ids(chain, [5, 9], 40, repetition_penalty=1.2)


def test_defaults_out_of_range_are_refused(tiny_chain_parts: Any, tmp_path: Path) -> None:
    folder = package_with_defaults(tiny_chain_parts, tmp_path / "chain", {"top_p": 2})
    path = folder / "target" / "generation_config.json"
    with pytest.raises(UserError, match=f"sampling setting out of range: top_p=2 in {path}; "):
        load_chain(folder)


def test_statistics_add_up(chain: Chain) -> None:
    generation = chain.generate("w5 w9 w2", max_new_tokens=40)
    statistics = generation.statistics
    assert statistics.num_tokens == len(generation.token_ids)
    assert statistics.num_first == 1
    assert sum(statistics.accepted_lengths["target"]) == statistics.num_tokens - 1
    assert statistics.forward_passes["target"] == len(statistics.accepted_lengths["target"])
    assert (
        statistics.forward_passes["intermediate"]
        == len(statistics.accepted_lengths["intermediate"])
        > 0
    )
    assert statistics.forward_passes["draft"] > 0
    assert 0 < sum(statistics.seconds_by_member.values()) < statistics.seconds
    assert statistics.mean_accepted_length > 1


TWO_MEMBERS = Plan(members=("target", "draft"), tree=Tree(depth=2, top_k=3, rows=5))


def measured(folder: Path, hardware: str, **conditions: Any) -> MeasuredPlan:
    """Add a plan to a chain, as if it had been measured on this hardware."""
    alone = TWO_MEMBERS.model_copy(update={"members": ("target",), "ngram": Ngram()})
    given = {"dtype": "float32", "temperature": 0.0, "plan": TWO_MEMBERS} | conditions
    plan = MeasuredPlan(
        hardware=hardware,
        **given,
        seconds_per_token=0.5,
        others=(PredictedPlan(plan=alone, seconds_per_token=0.7),),
    )
    record_plan(folder, plan)
    return plan


def members_that_ran(chain: Chain, **options: Any) -> set[str]:
    return set(chain.generate("w5", max_new_tokens=10, **options).statistics.forward_passes)


def test_plan_of_the_caller_wins(tiny_chain: Path, caplog: pytest.LogCaptureFixture) -> None:
    measured(tiny_chain, "an abacus")
    chain = load_chain(tiny_chain, dtype="float32", plan=TWO_MEMBERS)
    assert members_that_ran(chain) == {"target", "draft"}
    assert chain.measured_plan is None
    assert caplog.messages == []
    alone = TWO_MEMBERS.model_copy(update={"members": ("target",)})
    assert members_that_ran(chain, plan=alone) == {"target"}
    with pytest.raises(UserError, match="members differ from the plan's: target beside a plan of"):
        chain.stream("w5", plan=TWO_MEMBERS, members=["target"])
    wrong = Plan(members=("target", "intermediate"), tree=TWO_MEMBERS.tree)
    with pytest.raises(UserError, match=r"plan cannot run: plan\.flush lacks target"):
        load_chain(tiny_chain, plan=wrong)
    with pytest.raises(UserError, match=r"plan cannot run: plan\.flush lacks target"):
        chain.generate("w5", max_new_tokens=9, plan=wrong)


def test_the_plan_that_was_measured_on_this_machine_runs(
    tiny_chain: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plan = measured(tiny_chain, hardware_name(torch.device("cpu")))
    chain = load_chain(tiny_chain, dtype="float32", device="cpu")
    assert (chain.plan, chain.measured_plan) == (TWO_MEMBERS, plan)
    assert members_that_ran(chain) == {"target", "draft"}
    assert chain.predicted_seconds_per_token(TWO_MEMBERS) == 0.5
    assert chain.predicted_seconds_per_token(plan.others[0].plan) == 0.7
    assert chain.predicted_seconds_per_token(chain.manifest.plan) is None
    assert caplog.messages == []


def test_each_temperature_runs_by_its_own_plan(
    tiny_chain: Path, caplog: pytest.LogCaptureFixture
) -> None:
    here = hardware_name(torch.device("cpu"))
    alone = Plan(members=("target",), tree=TWO_MEMBERS.tree)
    measured(tiny_chain, here)
    by_load = (LoadPlan(sequences=1, plan=alone, seconds_per_token=1),)
    drawn = measured(tiny_chain, here, temperature=1.0, plan=alone, by_load=by_load)
    chain = load_chain(tiny_chain, dtype="float32")
    assert members_that_ran(chain) == {"target", "draft"}
    assert members_that_ran(chain, temperature=1.0) == {"target"}
    assert members_that_ran(chain, temperature=1.0, members=["target", "draft"]) == {
        *("target", "draft")
    }
    asked = load_chain(tiny_chain, dtype="float32", temperature=1.0)
    assert (asked.plan, asked.measured_plan) == (alone, drawn)
    assert members_that_ran(asked, temperature=0.0) == {"target", "draft"}
    assert caplog.messages == []
    assert load_chain(tiny_chain, dtype="bfloat16").measured_plan is None
    assert caplog.messages == [
        "the chain's plans were measured in float32, not in bfloat16; it runs as it was packed; "
        f"measure here: polybasic plan {tiny_chain} --dtype bfloat16"
    ]


def test_plans_of_other_machines_are_reported(
    tiny_chain: Path, caplog: pytest.LogCaptureFixture
) -> None:
    chain = load_chain(tiny_chain, dtype="float32")
    assert caplog.messages == []
    measured(tiny_chain, "an abacus")
    chain = load_chain(tiny_chain, dtype="float32", device="cpu")
    assert chain.plan == chain.manifest.plan
    assert chain.measured_plan is None
    here = hardware_name(torch.device("cpu"))
    assert caplog.messages == [
        f"the chain's plans were measured on an abacus, not on {here}; it runs as it was packed; "
        f"measure here: polybasic plan {tiny_chain} --dtype float32"
    ]


def test_named_members_are_exactly_those(tiny_chain: Path) -> None:
    plan = Plan(
        members=("target", "intermediate", "draft"),
        tree=Tree(depth=2, top_k=2, rows=5),
        flush={"target": Flush(length=3)},
        ngram=Ngram(),
    )
    chain = load_chain(tiny_chain, dtype="float32", plan=plan)
    bare = plan.model_copy(update={"ngram": None})
    assert chain.plan_of(plan.members) == bare
    two = chain.plan_of(["target", "draft"])
    assert two == bare.model_copy(update={"members": ("target", "draft")})
    assert members_that_ran(chain, members=["target"]) == {"target"}
    for members in (["target", "nobody"], [], ["draft", "target"], ["intermediate", "draft"]):
        with pytest.raises(UserError, match=r"plan cannot run: .*; members: target, intermed"):
            chain.generate("w5", max_new_tokens=9, members=members)


def test_plans_of_other_members_come_from_measurement(tiny_chain: Path) -> None:
    plan = measured(tiny_chain, hardware_name(torch.device("cpu")))
    other = plan.others[0].plan.model_copy(update={"tree": Tree(depth=1, top_k=2, rows=3)})
    others = (PredictedPlan(plan=other, seconds_per_token=0.7),)
    manifest = read_manifest(tiny_chain)
    changed = plan.model_copy(update={"others": others})
    write_manifest(tiny_chain, manifest.model_copy(update={"plans": (changed,)}))
    chain = load_chain(tiny_chain, dtype="float32", device="cpu")
    assert chain.plan_of(["target"]) == other.model_copy(update={"ngram": None})
    whole = ["target", "intermediate", "draft"]
    assert chain.plan_of(whole) == chain.manifest.plan
    assert members_that_ran(chain, members=whole) == set(whole)


def test_the_shortest_member_bounds_the_context(tiny_chain_parts: Any, tmp_path: Path) -> None:
    path = tiny_chain_parts.draft / "config.json"
    write_json(path, {**read_json(path, "config"), "max_position_embeddings": 100})
    tiny_chain_parts.package(tmp_path / "chain")
    assert load_chain(tmp_path / "chain").engine.context_tokens == 100
    assert load_chain(tmp_path / "chain", context_tokens=64).engine.context_tokens == 64
    refusal = "context out of range: context_tokens=101; use 1 to 100, for which draft is declared"
    with pytest.raises(UserError, match=refusal):
        load_chain(tmp_path / "chain", context_tokens=101)


def test_warnings_of_the_check_are_reported(
    tiny_chain: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def warned(*arguments: Any) -> Any:
        return dataclasses.replace(check_chain(*arguments), warnings=("small is large",))

    monkeypatch.setattr("polybasic.deploy.runtime.load.check_chain", warned)
    load_chain(tiny_chain)
    assert caplog.messages == ["small is large"]


def test_refusals_of_a_request(chain: Chain) -> None:
    def refuse(message: str, ids: list[int], num: int = 10, **settings: Any) -> None:
        with pytest.raises(UserError) as refusal:
            continue_ids(chain, ids, num, **settings)
        assert str(refusal.value).startswith(message)

    refuse("prompt does not fit the context: 120 prompt tokens and 10 new ones", [1] * 120)
    refuse("empty prompt: 0 tokens; give at least one token", [])
    refuse("nothing to generate: max_new_tokens=0", [1], 0)
    refuse("token outside of the vocabulary: id 64 of 64", [1, 64])
    refuse("plan cannot run: plan.members draft, target must be", [1], members=("draft", "target"))
    refuse("plan cannot run: plan.members must begin with target", [1], members=("intermediate",))
    refuse("sampling setting out of range: temperature=-1", [1], temperature=-1)
    refuse("token outside of the vocabulary: logit_bias of id 64", [1], logit_bias={64: 1})
    assert len(continue_ids(chain, [1] * 118, 10)) == 10


def test_refusals_of_loading(tiny_chain: Path) -> None:
    with pytest.raises(UserError, match="unknown dtype: dtype=int8; use one of bfloat16"):
        load_chain(tiny_chain, dtype="int8")
    for context_tokens in (0, 129):
        refusal = f"context out of range: context_tokens={context_tokens}; use 1 to 128"
        with pytest.raises(UserError, match=refusal):
            load_chain(tiny_chain, context_tokens=context_tokens)


def test_refusals_of_options_come_before_the_first_piece(chain: Chain) -> None:
    for options, refusal in (
        ({"top_p": 3}, "sampling setting out of range: top_p=3"),
        ({"logit_bias": {64: 1}}, "token outside of the vocabulary"),
        ({"stop": ""}, "empty stop string"),
        ({"stop": ["a", ""]}, "empty stop string"),
    ):
        with pytest.raises(UserError, match=refusal):
            chain.stream("w5", **options)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="tempratur"):
        chain.stream("w5", tempratur=1)  # type: ignore[call-arg]


@pytest.mark.parametrize("members", MEMBER_SETS[1:], ids=len)
def test_a_second_stream_changes_nothing(chain: Chain, members: tuple[str, ...]) -> None:
    expected = [continue_ids(chain, prompt, 20, members=members) for prompt in PROMPTS[:2]]
    plan = chain.plan_of(members)
    first, second = (chain.stream_ids(prompt, 20, Sampling(), plan) for prompt in PROMPTS[:2])
    tokens = next(first)
    assert list(itertools.chain(*second)) == expected[1]
    assert [*tokens, *itertools.chain(*first)] == expected[0]


def test_a_stream_that_is_given_up_keeps_nobody_out(chain: Chain) -> None:
    expected = chain.generate("w5 w9", max_new_tokens=20).text

    def give_up() -> None:
        for piece in chain.stream("w7", max_new_tokens=20):
            raise ZeroDivisionError(piece.text)

    stream = chain.stream("w7", max_new_tokens=20)
    next(stream)
    stream.close()
    assert chain.generate("w5 w9", max_new_tokens=20).text == expected
    stream = chain.stream("w7", max_new_tokens=20)
    next(stream)
    del stream
    assert chain.generate("w5 w9", max_new_tokens=20).text == expected
    with pytest.raises(ZeroDivisionError) as kept:
        give_up()
    assert chain.generate("w5 w9", max_new_tokens=20).text == expected
    assert kept.tb is not None, "the frame that was left is still held"


def test_messages_without_a_template_are_refused(chain: Chain) -> None:
    chain.tokenizer.chat_template = None
    assert chain.encode("w5 w6") == [5, 6]
    with pytest.raises(UserError, match="no chat template"):
        chain.encode([{"role": "user", "content": "w5"}])
