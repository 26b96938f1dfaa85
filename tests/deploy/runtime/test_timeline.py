"""Timelines: the same answer, and events that are its passes, drafts and draws."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from torch import Tensor

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.plan import Flush, Ngram, Plan, Tree
from polybasic.deploy import Chain, load_chain
from polybasic.deploy.runtime.timeline import Event, Rates, Timeline, bytes_read
from tests.deploy.noisy_chain import write_four_and_a_copy
from tests.recipes.command_line import call

PLAN = Plan(
    members=("target", "intermediate", "draft"),
    tree=Tree(depth=3, top_k=2, rows=6),
    flush={"target": Flush(length=6)},
    ngram=Ngram(min_match=1),
)
PROMPT = [5, 9, 2, 30]


@pytest.fixture(scope="module")
def chain(_tiny_four_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Chain:
    folder = write_four_and_a_copy(_tiny_four_models, tmp_path_factory.mktemp("timed"))
    return load_chain(folder, dtype="float32", context_tokens=100)


@pytest.mark.parametrize(
    "settings", [{"temperature": 0.0}, {"seed": 3, "temperature": 0.7}], ids=["greedy", "sampled"]
)
def test_events_are_the_passes_of_the_answer(chain: Chain, settings: dict) -> None:
    given = settings | {"plan": PLAN, "max_new_tokens": 24}
    answer, found = chain.generate(PROMPT, **given), chain.timeline(PROMPT, **given)
    assert (found.token_ids, found.text) == (answer.token_ids, answer.text)
    prompt, *rounds = found.rounds
    assert [(event.member, event.rows) for event in prompt if event.what == "prompt"] == [
        ("target", 4)
    ]
    counted = Counter((event.what, event.member) for events in rounds for event in events)
    passes = answer.statistics.forward_passes
    assert counted["pass", "target"] == passes["target"] == len(rounds)
    assert counted["pass", "intermediate"] == passes["intermediate"]
    assert counted["draft", "draft"] > 0
    assert counted["copy", "ngram"] == counted["pass", "intermediate"]
    assert counted["draw", "target"] == counted["pass", "target"]
    shares = found.shares()
    assert [share.seconds for share in shares] == sorted(
        (share.seconds for share in shares), reverse=True
    )
    assert {(share.what, share.member) for share in shares} >= set(counted) - {("draft", "draft")}
    assert sum(share.num for share in shares) == sum(map(len, found.rounds))
    seconds = sum(share.seconds for share in found.shares(rounds[0]))
    assert seconds == pytest.approx(sum(event.seconds for event in rounds[0]))


def test_bounds_are_those_of_bytes_or_of_products() -> None:
    rates = Rates(100.0, {"target": 10.0})
    few = Event("pass", "target", 1, 3.0, num_bytes=200, multiply_adds=10)
    assert rates.bound(few) == 2.0
    assert rates.bound(replace(few, multiply_adds=90)) == 9.0
    assert rates.bound(Event("draft", "head", 4, 1.0, num_bytes=50)) == 0.5
    assert rates.bound(Event("between", "", 0, 1.0)) is None
    rounds = [[few], [few, few], [few], [few, few, few]]
    assert Timeline("", [], rounds, rates).median_round == 1
    assert Timeline("", [], rounds[:1], rates).median_round == 0


def test_a_pass_reads_all_weights_but_a_table(chain: Chain) -> None:
    found = bytes_read(chain.engine, chain.memory)
    for name, decoder in chain.engine.models.decoders.items():
        weights, table = chain.memory.members[name]["weights"], decoder.weights.embedding
        assert isinstance(table, Tensor)
        is_table_too = decoder.config.tie_word_embeddings and chain.memory.layout.kernels == "eager"
        assert found[name] == weights - (0 if is_table_too else table.nbytes)
        assert found[name] > decoder.config.vocab_size * decoder.config.hidden_size


def test_a_busy_chain_is_not_timed(chain: Chain) -> None:
    live = chain.begin(PROMPT, max_new_tokens=4)
    with pytest.raises(UserError, match="chain is busy: 1 answers are being made"):
        chain.timeline(PROMPT, max_new_tokens=4)
    live.close()


def test_the_command_shows_and_writes_events(tiny_chain: Path, tmp_path: Path) -> None:
    out = tmp_path / "events.jsonl"
    asked = ["trace", tiny_chain, "-p", "w5 w9", "--dtype", "float32", "--timeline"]
    code, shown, err = call(*asked, "--max-new-tokens", "8", "--out", out)
    assert code == 0
    rows = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
    assert {row["what"] for row in rows} >= {"prompt", "pass", "draft", "draw", "between"}
    assert rows[0]["round"] == 0
    for text in ("tokens in", "The answer", "pass of target", "draws", "ms a token"):
        assert text in shown
    assert f"wrote {out}: {len(rows)} events" in err
