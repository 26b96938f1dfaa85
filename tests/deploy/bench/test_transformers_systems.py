"""Which of transformers' systems a chain gets, with what they share and why others are missing."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from polybasic.chain.base.errors import UserError
from polybasic.deploy import Chain, load_chain
from polybasic.deploy.bench.systems.compiled_loop import CompiledLoop
from polybasic.deploy.bench.systems.generate_loops import GenerateLoop
from polybasic.deploy.bench.systems.transformers_systems import transformers_systems
from polybasic.deploy.runtime.rounds.sampling import Sampling
from tests.deploy.noisy_chain import write_noisy_chain

ALL = ("hf_generate", "hf_static", "hf_prompt_lookup", "hf_assisted")
PROMPTS = [[5, 9, 2], [7, 8, 9, 10], [5]]


@pytest.fixture
def chain(tmp_path: Path) -> Chain:
    """With an independent draft model."""
    return load_chain(write_noisy_chain(tmp_path), dtype="float32")


def made(chain: Chain, *names: str) -> tuple[dict[str, Any], dict[str, str]]:
    systems, left_out = transformers_systems(names, chain, PROMPTS, 12, lambda line: None)
    return {system.name: system for system in systems}, left_out


def test_loops_share_the_target_and_answer_alike(chain: Chain) -> None:
    names = ("target", "hf_assisted", "hf_generate", "hf_prompt_lookup", "polybasic")
    systems, left_out = made(chain, *names)
    assert list(systems) == ["hf_assisted", "hf_generate", "hf_prompt_lookup"]
    assert left_out == {}
    plain, assisted = systems["hf_generate"], systems["hf_assisted"]
    assert all(system.model is plain.model for system in systems.values())
    attention = plain.model.config._attn_implementation
    assert plain.description.endswith(f"on the source target, {attention} attention")
    assert assisted.assistant.config._attn_implementation == attention
    assert "assistant_model=copy" in assisted.description, "no intermediate while there is a copy"
    (note,) = plain.notes
    assert "to a prompt of 3 takes" in note, "the median length"
    assert f"transformers runs in {plain.dtype} with {attention} attention" in note
    answers = {name: system.answer(PROMPTS[0], 12, Sampling()) for name, system in systems.items()}
    if plain.dtype == "float32":
        assert len({tuple(answer.token_ids) for answer in answers.values()}) == 1
    for system in systems.values():
        system.close()
        assert system.model is None


def test_a_chain_without_a_model_to_draft_with_is_refused(tiny_chain: Path) -> None:
    chain = load_chain(tiny_chain, dtype="float32")
    with pytest.raises(UserError, match=r"system without members: hf_assisted in bench\.systems"):
        made(chain, "hf_generate", "hf_assisted")
    assert made(chain, "target") == ({}, {})


def test_a_whole_intermediate_drafts_where_nothing_else_does(chain: Chain) -> None:
    drafters = tuple(member for member in chain.manifest.members if member.name != "copy")
    chain.manifest = chain.manifest.model_copy(update={"members": drafters})
    assert "assistant_model=near" in made(chain, "hf_assisted")[0]["hf_assisted"].description


def fails(message: str) -> Callable[..., Any]:
    def compiling(call: Any, **options: Any) -> Any:
        raise RuntimeError(message)

    return compiling


@pytest.mark.parametrize(
    ("compiling", "reason"),
    [
        (
            fails("inductor raised:\n\n InvalidCxxCompiler: none\nand more"),
            "torch.compile fails on it: inductor raised: InvalidCxxCompiler: none",
        ),
        (fails("no compiler.\nand more"), "torch.compile fails on it: no compiler"),
        (fails(""), "torch.compile fails on it: RuntimeError"),
        (lambda call, **options: call, "transformers compiles nothing of it on this machine"),
    ],
    ids=["two lines", "a line", "no line", "does nothing"],
)
def test_what_is_not_compiled_is_left_out(
    chain: Chain, compiling: Callable[..., Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", compiling)
    systems, left_out = made(chain, "hf_generate", "hf_static")
    assert list(systems) == ["hf_generate"]
    assert left_out == {"hf_static": reason}


@pytest.mark.proof
def test_no_time_has_a_compile(chain: Chain, monkeypatch: pytest.MonkeyPatch) -> None:
    """The C++ compiler takes seconds, an answer of this model takes milliseconds."""
    said: list[str] = []
    systems, left_out = transformers_systems(
        ("hf_generate", "hf_static"), chain, PROMPTS, 12, said.append
    )
    assert not left_out
    assert said[-1] == "hf_static: transformers compiles the target, which can take minutes"
    plain, compiled = systems
    assert isinstance(plain, GenerateLoop)
    assert isinstance(compiled, CompiledLoop)
    asked: list[int] = []
    generate = compiled.model.generate
    monkeypatch.setattr(
        compiled.model, "generate", lambda ids, **named: asked.append(1) or generate(ids, **named)
    )
    for prompt in PROMPTS:
        found = compiled.answer(prompt, 12, Sampling())
        assert found.seconds < 1
        torch.testing.assert_close(
            compiled.logits([*prompt, *found.token_ids], 12),
            plain.logits([*prompt, *found.token_ids], 12),
            atol=1e-3 if plain.dtype == "float32" else 1,
            rtol=1e-3,
        )
    assert len(asked) == 9, "one graph serves all that fits the cache"
    asked.clear()
    sampled = [compiled.answer([5], 12, Sampling(1.0, seed=seed)).token_ids for seed in (1, 1, 2)]
    assert sampled[0] == sampled[1] != sampled[2]
    asked.clear()
    longer = compiled.answer(list(range(30)), 12, Sampling())
    assert len(asked) > 1, "repeated, as it compiled"
    assert longer.seconds < 1
    assert len(longer.token_ids) <= 12
