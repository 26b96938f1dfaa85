"""Answers behind long contexts: caches that were filled once give what a request would get."""

import json
from pathlib import Path
from typing import Any

import pytest

from polybasic.deploy import Chain, load_chain
from polybasic.deploy.rounds.sampling import Sampling
from tests.benchmarks.scripts import load_script

contexts = load_script("contexts")

LENGTHS = (30, 50, 90)
SETTINGS = contexts.ContextSettings(
    contexts=LENGTHS, windows=(8,), prefill_tokens=60, max_new_tokens=12, turns=2
)
TEXTS = {num: [1 + (place * place) % 57 for place in range(num)] for num in LENGTHS}


@pytest.fixture
def chain(tiny_chain: Path) -> Chain:
    return load_chain(tiny_chain, dtype="float32", context_tokens=200, beyond_declared=True)


def test_all_systems_answer_as_the_target_from_filled_caches(chain: Chain) -> None:
    alone = chain.plan_of(["target"])
    expected = {
        num: [token for new in chain.stream_ids(TEXTS[num], 16, Sampling(), alone) for token in new]
        for num in LENGTHS
    }
    systems = contexts.make_systems(chain, SETTINGS.windows)
    assert list(systems) == [
        "target",
        "eagle2",
        "eagle2, window 8",
        "polybasic_full",
        "polybasic_full, window 8",
        "polybasic_full, own caches",
        "polybasic_full, own caches, window 8",
    ]
    measured = contexts.Contexts(systems, TEXTS, SETTINGS)
    for num in LENGTHS:
        context = measured.measure(num)
        content = json.loads(json.dumps(context.to_json()))
        is_repeated = num > SETTINGS.prefill_tokens
        assert content["is_repeated"] == is_repeated
        for name, one in context.systems.items():
            assert content["systems"][name]["answers_as_target"]
            assert len(one.tokens) >= SETTINGS.max_new_tokens
            assert len(one.turns) == SETTINGS.turns
            # repeated rows stand for another text
            right = expected[num][: SETTINGS.max_new_tokens]
            assert (one.tokens[: len(right)] == right) != is_repeated
        in_bytes = {name: one.cache_bytes for name, one in context.systems.items()}
        assert in_bytes["target"] < in_bytes["eagle2"] == in_bytes["polybasic_full"]
        own = in_bytes["polybasic_full, own caches"]
        assert own == in_bytes["target"] + in_bytes["polybasic_full"]
    contexts.print_contexts([context], systems, chain)


def test_command(
    chain: Chain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    record = tmp_path / "record.json"
    words = (
        f"{chain.folder} --contexts 30 20 --windows --max-new-tokens 4 --turns 1 --json {record}"
    )
    monkeypatch.setattr("sys.argv", ["contexts.py", *words.split(), "--dtype", "float32"])
    monkeypatch.setattr(
        contexts, "long_texts", lambda chain, lengths: {n: TEXTS[30][:n] for n in lengths}
    )
    contexts.main()
    written = json.loads(record.read_text())
    assert written["schema"] == "polybasic.benchmark.contexts/1"
    assert list(written["contexts"]) == ["20", "30"]
    assert written["declared_context_tokens"] < 30 + 4 + contexts.ROOM_TOKENS
    assert "30 tokens; seconds of prefill" in capsys.readouterr().out
