"""`polybasic serve --learn`: a server whose head becomes better, the same answers, and back."""

import json
import shutil
import time
from pathlib import Path

import pytest
from safetensors.torch import save_file

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.checkpoints.checkpoint import load_tensors
from polybasic.chain.formats.learned import (
    Learned,
    learned_folder,
    read_learned,
    writing_learned,
)
from polybasic.deploy import load_chain
from polybasic.deploy.runtime.chain import Chain
from polybasic.recipes.pipeline import learning
from polybasic.recipes.pipeline.learning import ChainLearner
from polybasic.train.head import online
from tests.conftest import PLAN, ChainParts
from tests.deploy.serve.serving import serving
from tests.recipes.command_line import call, refusal

PROMPTS = [[first, first + 1, first + 2] for first in range(3, 40, 6)]


@pytest.fixture
def chain_folder(
    tiny_chain_parts: ChainParts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A chain whose head has weights of a size that can be trained, in few answers."""
    monkeypatch.setattr(learning, "LEARNING_RATE", 3e-3)
    monkeypatch.setattr(online, "PASSES", 20)
    monkeypatch.setattr(online, "_CONTEXT", 16)
    path = tiny_chain_parts.draft / "model.safetensors"
    save_file({name: 0.1 * each for name, each in load_tensors(path.parent).items()}, path)
    plan = PLAN.model_copy(update={"members": ("target", "draft"), "flush": {}})
    tiny_chain_parts.package(tmp_path / "chain", plan=plan)
    return tmp_path / "chain"


def answers(chain: Chain, **options: object) -> list[list[int]]:
    options = {"max_new_tokens": 60, "temperature": 0, "ignore_eos": True, **options}
    return [chain.generate(prompt, **options).token_ids for prompt in PROMPTS]  # type: ignore[arg-type]


def num_passes(chain: Chain) -> int:
    """Of the target, for all prompts."""
    options: dict[str, object] = {"max_new_tokens": 60, "temperature": 0, "ignore_eos": True}
    found = [chain.generate(prompt, **options).statistics for prompt in PROMPTS]  # type: ignore[arg-type]
    return sum(statistics.forward_passes["target"] for statistics in found)


def learned_from(chain: Chain, learner: ChainLearner) -> None:
    """The same answers over and over: those of random weights have nothing else in common."""
    given = list(zip(PROMPTS, answers(chain), strict=True))
    for prompt, answer in 4 * given:
        learner.add(prompt, answer)
        while learner.work():
            pass


def test_answers_stay_and_passes_become_fewer(chain_folder: Path) -> None:
    chain = load_chain(chain_folder)
    greedy, drawn, before = answers(chain), answers(chain, temperature=1, seed=5), num_passes(chain)
    learner = ChainLearner(chain)
    learned_from(chain, learner)
    progress = learner.progress
    assert progress.num_heads > 0
    assert progress.num_tokens > 0
    assert num_passes(chain) < 0.8 * before
    assert answers(chain) == greedy
    assert answers(chain, temperature=1, seed=5) == drawn
    record = read_learned(chain_folder)
    assert record is not None
    assert record.num_answers <= 4 * len(PROMPTS)
    assert record.tokens_a_round[1] > record.tokens_a_round[0]
    # and so in a process that comes later, which goes on from there
    later = load_chain(chain_folder)
    assert num_passes(later) == num_passes(chain)
    assert answers(later) == greedy
    again = ChainLearner(later)
    assert again._before == record
    assert "nothing to remove" in call("forget", chain_folder.parent / "models" / "target")[2]
    assert call("forget", chain_folder, "--yes")[0] == 0
    assert not learned_folder(chain_folder).exists()
    assert num_passes(load_chain(chain_folder)) == before


def test_a_server_learns_while_nobody_asks(chain_folder: Path) -> None:
    chain = load_chain(chain_folder, sequences=2)
    with serving(chain, learner=ChainLearner(chain)) as served:
        asked = {"max_tokens": 60, "temperature": 0, "ignore_eos": True}

        def texts() -> list[str]:
            found = [served.complete(prompt=prompt, **asked) for prompt in PROMPTS]
            return [answer["choices"][0]["text"] for answer in found]

        first, until = texts(), time.monotonic() + 120
        while served.metric("learned_heads") == 0:
            assert time.monotonic() < until
            assert texts() == first
            time.sleep(0.5)
        assert served.metric("learning_seconds_total") > 0
        assert served.metric("learned_tokens") > 0
        assert texts() == first
    assert learned_folder(chain_folder).is_dir()


def test_what_cannot_learn_is_refused(chain_folder: Path, tiny_chain: Path) -> None:
    plan = PLAN.model_copy(update={"members": ("target",), "flush": {}})
    alone = load_chain(chain_folder, plan=plan)
    with pytest.raises(UserError, match=r"no head that could learn: the plan of .* drafts with"):
        ChainLearner(alone)
    line = refusal("serve", chain_folder.parent / "models" / "target", "--learn", "--port", 0)
    assert line.startswith("error: no head that could learn: ")


def test_a_record_that_is_broken_or_of_another_head(
    chain_folder: Path, tiny_chain_parts: ChainParts
) -> None:
    chain = load_chain(chain_folder)
    before, files = num_passes(chain), chain.manifest.member("draft").files
    learned = Learned(
        member="draft",
        files=files,
        num_answers=3,
        num_tokens=100,
        num_steps=2,
        tokens_a_round=(1.5, 2.0),
    )
    with writing_learned(chain_folder, learned) as folder:
        shutil.copytree(tiny_chain_parts.draft, folder, dirs_exist_ok=True)
        path = folder / "model.safetensors"
        path.unlink()
        weights = load_tensors(tiny_chain_parts.draft)
        save_file({name: each.flip(0).clone() for name, each in weights.items()}, path)
    said: list[str] = []
    other = load_chain(chain_folder, say=said.append)
    assert said[0].startswith("draft has learned from 3 answers; undo it: polybasic forget ")
    drafted = [answers(each, members=["target", "draft"]) for each in (chain, other)]
    assert drafted[0] == drafted[1]
    path = learned_folder(chain_folder) / "learned.json"
    content = json.loads(path.read_text())
    content["files"] = dict.fromkeys(content["files"], "0" * 64)
    path.write_text(json.dumps(content))
    assert num_passes(load_chain(chain_folder)) == before
    path.write_text(json.dumps(content | {"num_steps": "many"}))
    with pytest.raises(UserError, match=r"learned.json num_steps: .* polybasic forget"):
        load_chain(chain_folder)
