"""Answers that match a grammar: beside transformers and llguidance, and checked by jsonschema."""

import json
import random
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from llguidance import LLMatcher

from polybasic import Grammar, load_chain
from polybasic.chain.base.errors import UserError
from polybasic.deploy.runtime.chain import Chain
from polybasic.deploy.runtime.rounds.constraint import Constraint
from tests.deploy.byte_target import write_byte_target
from tests.recipes.command_line import call, refusal

PERSON = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["cat", "dog", 'a "bird"']},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "ok": {"type": "boolean"},
    },
    "required": ["kind", "age", "ok"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target whose tokens are bytes."""
    folder = tmp_path_factory.mktemp("bytes")
    write_byte_target(folder)
    return folder


@pytest.fixture(scope="module")
def chain(folder: Path) -> Chain:
    """The target, and n-grams."""
    return load_chain(folder, dtype="float32")


def answer(chain: Chain, grammar: Grammar, **options: Any) -> str:
    """An answer that has ended, the same whatever runs."""
    options = {"max_new_tokens": 300, "temperature": 0.0} | options
    found = chain.generate("a cat?", grammar=grammar, **options)
    assert found.statistics.stopped_by == "stop"
    alone = chain.generate("a cat?", grammar=grammar, members=["target"], **options)
    assert found.token_ids == alone.token_ids
    return found.text


@pytest.mark.parametrize("seed", [None, 3])
def test_answers_match(chain: Chain, seed: int | None) -> None:
    options: dict[str, Any] = {} if seed is None else {"temperature": 1.0, "seed": seed}
    found = json.loads(answer(chain, Grammar.json_schema(PERSON), **options))
    jsonschema.validate(found, PERSON)
    assert found == json.loads(answer(chain, Grammar.json_schema(json.dumps(PERSON)), **options))
    assert re.fullmatch(
        r"[0-9]{4}-[ab]+x", answer(chain, Grammar.regex(r"[0-9]{4}-[ab]{1,9}x"), **options)
    )
    texts = ['say "no"', "line\nfeed", "ü", r"\d", "/a/i"]
    for text in texts:
        assert answer(chain, Grammar.choice([text]), **options) == text
    assert answer(chain, Grammar.choice(texts), **options) in texts
    of_sums = 'start: "1" ("+" "1")* "="'
    assert re.fullmatch(r"1(\+1)*=", answer(chain, Grammar.lark(of_sums), **options))


def test_answers_are_those_of_transformers_under_the_same_masks(chain: Chain, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, LogitsProcessor, LogitsProcessorList

    grammar, prompt = Grammar.json_schema(PERSON), chain.encode("a cat?")
    tokens = chain.vocabulary._tokens

    class Masked(LogitsProcessor):
        def __call__(self, input_ids: Any, scores: Any) -> Any:
            matcher = LLMatcher(tokens, grammar.text)
            assert matcher.consume_tokens(input_ids[0, len(prompt) :].tolist())
            bits = torch.tensor(list(matcher.compute_logit_bias()))[: scores.shape[1]]
            return scores.masked_fill(bits == 0, float("-inf"))

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected = model.generate(
        torch.tensor([prompt]),
        max_new_tokens=300,
        do_sample=False,
        eos_token_id=sorted(chain.stop_tokens),
        logits_processor=LogitsProcessorList([Masked()]),
    )
    found = chain.generate(prompt, grammar=grammar, max_new_tokens=300, temperature=0)
    assert found.token_ids == expected[0, len(prompt) :].tolist()


def schema_of(draw: random.Random, depth: int = 3) -> Any:
    """A random schema of which every value is short."""
    kind = draw.choice(
        ["enum", "integer", "boolean", "const", "string", "array", "object"][: None if depth else 5]
    )
    if kind == "enum":
        return {"enum": draw.sample(["a", "b c", 1, -2.5, None, True, [1], {"x": "y"}], 3)}
    if kind == "integer":
        low = draw.randrange(-50, 50)
        return {"type": "integer", "minimum": low, "maximum": low + draw.randrange(100)}
    if kind == "boolean":
        return {"type": draw.choice(["boolean", "null"])}
    if kind == "const":
        return {"const": draw.choice(["é\n", 7, {"k": [None]}])}
    if kind == "string":
        return {"type": "string", "maxLength": draw.randrange(6)}
    if kind == "array":
        most = draw.randrange(1, 4)
        least = draw.randrange(most + 1)
        return {
            "type": "array",
            "items": schema_of(draw, depth - 1),
            "minItems": least,
            "maxItems": most,
        }
    names = draw.sample(["a", "b", "long name", "ü"], draw.randrange(1, 4))
    properties = {name: schema_of(draw, depth - 1) for name in names}
    required = names[: draw.randrange(len(names) + 1)]
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


@pytest.mark.parametrize("num", [40, pytest.param(1000, marks=pytest.mark.proof)])
def test_answers_are_of_random_schemas(chain: Chain, num: int) -> None:
    draw = random.Random(1)
    for seed in range(num):
        schema = schema_of(draw)
        found = chain.generate(
            "a cat?",
            grammar=Grammar.json_schema(schema),
            max_new_tokens=480,
            temperature=1.0,
            seed=seed,
        )
        assert found.statistics.stopped_by == "stop", (schema, found.text)
        jsonschema.validate(json.loads(found.text), schema)


def test_answers_at_the_same_time_have_grammars_of_their_own(chain: Chain) -> None:
    grammars = [Grammar.choice([text]) for text in ("one", "two", "one")]
    streams = [
        chain.stream("a cat?", grammar=grammar, max_new_tokens=20) for grammar in (*grammars, None)
    ]
    texts = ["" for _ in streams]
    for _ in range(30):
        for place, stream in enumerate(streams):
            texts[place] += "".join(piece.text for piece in [next(stream, None)] if piece)
    free = chain.generate("a cat?", max_new_tokens=20)
    assert texts == ["one", "two", "one", free.text]


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (lambda: Grammar.regex("("), "regex"),
        (lambda: Grammar.lark("start: nothing"), "nothing"),
        (lambda: Grammar.choice([]), "at least one"),
        (lambda: Grammar.choice(["a", ""]), "not empty"),
        (lambda: Grammar.choice(["a" * 70_000]), "of at most 65,536"),
        (lambda: Grammar.json_schema({"type": "nonsense"}), "nonsense"),
        (lambda: Grammar.json_schema("{"), "no JSON that can be read"),
        (lambda: Grammar.json_schema([1]), "an object of JSON"),
        (lambda: Grammar.json_schema(False), "an object of JSON"),
        (lambda: Grammar.json_schema({"type": "string", "format": "unheard-of"}), "format"),
    ],
)
def test_what_is_no_grammar_is_refused(made: Any, reason: str) -> None:
    with pytest.raises(UserError, match="grammar cannot be used: .*" + reason):
        made()


@pytest.mark.parametrize("seed", [None, 3])
def test_foretold_tokens_save_passes_and_change_none(
    chain: Chain, seed: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"temperature": 0.0} if seed is None else {"seed": seed}
    options |= {"grammar": Grammar.lark('start: /[a-c]{3}/ " is known from here on"')}
    found = chain.generate("a cat?", members=["target"], logprobs=1, **options)
    [proposed] = found.statistics.proposals.values()
    assert proposed.accepted == [2] * 6 + [1] * 9  # 15 at once, and 6 after the one that was drawn
    passes = found.statistics.forward_passes["target"]
    assert passes == found.statistics.num_later - 21
    assert all(entry.logprob < -1 for entry in found.logprobs), "of the model, without masks"
    monkeypatch.setattr(Constraint, "foretold", lambda *_: [])
    slowly = chain.generate("a cat?", members=["target"], **options)
    assert slowly.token_ids == found.token_ids
    assert slowly.statistics.forward_passes["target"] == passes + 21


def test_an_end_that_is_not_taken_is_refused(chain: Chain) -> None:
    with pytest.raises(UserError, match="grammar whose end is not taken: ignore_eos"):
        chain.generate("a", grammar=Grammar.choice(["b"]), ignore_eos=True)
    with pytest.raises(UserError, match="min_tokens=3"):
        chain.generate("a", grammar=Grammar.choice(["b"]), min_tokens=3)
    with pytest.raises(UserError, match="grammar"):
        chain.generate("a", grammar="a+")  # type: ignore[arg-type]


def test_the_command_takes_grammars(folder: Path, tmp_path: Path) -> None:
    schema, lark = tmp_path / "person.json", tmp_path / "sums.lark"
    schema.write_text(json.dumps(PERSON))
    lark.write_text('start: "1+1"')
    asked = ["generate", folder, "-p", "a cat?", "--dtype", "float32", "--temperature", "0"]
    code, said, err = call(*asked, "--json-schema", schema)
    assert code == 0, err
    jsonschema.validate(json.loads(said), PERSON)
    assert call(*asked, "--choice", "yes", "--choice", "yes", "--no-stream")[1] == "yes\n"
    assert call(*asked, "--regex", "ab{2}")[1] == "abb\n"
    assert call(*asked, "--grammar", lark)[1] == "1+1\n"
    assert "several grammars: --regex and --choice" in refusal(
        *asked, "--regex", "a", "--choice", "b"
    )
    assert f"{tmp_path / 'none.lark'}" in refusal(*asked, "--grammar", tmp_path / "none.lark")
    assert "JSON schema" in refusal(*asked, "--json-schema", tmp_path / "none.json")
