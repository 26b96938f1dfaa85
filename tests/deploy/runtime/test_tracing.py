"""Traces say what happened: the same answer, and rounds that add up to it."""

import json
from pathlib import Path

import pytest

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.plan import Flush, Plan, Tree
from polybasic.deploy import Chain, load_chain
from tests.deploy.noisy_chain import write_four_and_a_copy
from tests.recipes.command_line import call, refusal

TREE = Tree(depth=3, top_k=2, rows=6)
FLUSH = {"target": Flush(length=6), "intermediate": Flush(length=3)}
PROMPT = [5, 9, 2, 30]


@pytest.fixture(scope="module")
def folder(_tiny_four_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_four_and_a_copy(_tiny_four_models, tmp_path_factory.mktemp("traced"))


@pytest.fixture(scope="module")
def chain(folder: Path) -> Chain:
    return load_chain(folder, dtype="float32", context_tokens=100)


@pytest.mark.parametrize(
    "settings", [{"temperature": 0.0}, {"seed": 3, "temperature": 0.7}], ids=["greedy", "sampled"]
)
@pytest.mark.parametrize(
    "members", [("target",), ("target", "copy"), ("target", "intermediate", "copy")], ids=len
)
def test_rounds_add_up_to_the_answer(
    chain: Chain, members: tuple[str, ...], settings: dict
) -> None:
    plan = Plan(members=members, tree=TREE, flush=FLUSH)
    given = settings | {"plan": plan, "max_new_tokens": 20}
    found, answer = chain.trace(PROMPT, **given), chain.generate(PROMPT, **given)
    assert (found.token_ids, found.text) == (answer.token_ids, answer.text)
    roots = [traced for traced in found.rounds if traced.verifier == "target"]
    assert [token for traced in roots for token in traced.gained] == found.token_ids
    position = len(PROMPT)
    for traced in roots:
        assert traced.position == position
        position += len(traced.gained)
    for traced in found.rounds:
        assert [traced.tokens[place] for place in traced.kept] == traced.gained[: len(traced.kept)]
        assert [traced.parents[place] for place in traced.kept] == [-1, *traced.kept][
            : len(traced.kept)
        ]
        assert len(traced.gained) - len(traced.kept) in (0, 1)
        assert (traced.proposer == "") == (not traced.tokens)
        children = [
            probability
            for parent, probability in zip(traced.parents, traced.probabilities, strict=True)
            if parent == -1
        ]
        assert len(children) <= TREE.top_k
        assert sum(children) <= 1 + 1e-5
    passes = answer.statistics.forward_passes
    for name in {traced.verifier for traced in found.rounds}:
        num_rounds = sum(traced.verifier == name for traced in found.rounds)
        assert num_rounds == passes[name] + (name == "target")  # the prompt's last pass
    assert any(traced.kept for traced in found.rounds) == (len(members) > 1)


def test_a_busy_chain_is_not_traced(chain: Chain) -> None:
    live = chain.begin(PROMPT, max_new_tokens=4)
    with pytest.raises(UserError, match="chain is busy: 1 answers are being made"):
        chain.trace(PROMPT, max_new_tokens=4)
    live.close()


def test_the_command_shows_and_writes_rounds(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, svg = tmp_path / "rounds.jsonl", tmp_path / "rounds.svg"
    asked = ["trace", folder, "-p", "w5 w9", "--dtype", "float32", "--members", "target,copy"]
    code, shown, err = call(*asked, "--max-new-tokens", "6", "--out", out, "--svg", svg)
    assert code == 0
    rows = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
    assert len(shown.splitlines()) >= len(rows) + 2
    assert "copy → target" in shown
    assert all(len(row["texts"]) == len(row["tokens"]) for row in rows)
    assert sum(len(row["gained"]) for row in rows) == 6
    assert svg.read_text("utf-8").startswith("<svg")
    assert f"wrote {out}: {len(rows)} rounds" in err
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    assert "no single prompt: trace; give one of --prompt, --file" in refusal("trace", folder)
