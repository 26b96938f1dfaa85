"""A head that learns from answers in short pieces: what it gains, what bounds it, what stays."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from polybasic.chain.base.errors import UserError
from polybasic.train.features.lm_head import LmHead
from polybasic.train.head import online
from polybasic.train.head.files import write_head
from polybasic.train.head.online import PASSES, OnlineHead, Portion
from polybasic.train.head.start import new_head, trained_weights
from polybasic.train.settings import HeadSettings
from tests.train.counting import SMALL_SHAPE

VOCAB, WIDTH = SMALL_SHAPE.vocab_size, SMALL_SHAPE.hidden_size
SHAPES = {
    "eagle2": SMALL_SHAPE,
    "eagle3": replace(SMALL_SHAPE, kind="eagle3", feature_layers=(0, 1, 2)),
}


@pytest.fixture(autouse=True)
def _short_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(online, "_CONTEXT", 8)


class Counting:
    """A verifier that counts on, and whose states say so."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.embedding = torch.randn(VOCAB, WIDTH, generator=generator)
        self.lm_head = LmHead(self.embedding.clone())

    def text(self, first: int, length: int, width: int) -> tuple[Tensor, Tensor]:
        """Tokens that count on from `first`, and states [T, width] that expect the next one."""
        token_ids = (first + torch.arange(length)) % VOCAB
        return token_ids, self.embedding[(token_ids + 1) % VOCAB].repeat(1, width // WIDTH)


def written(folder: Path, kind: str) -> Path:
    """A random head on disk."""
    settings = HeadSettings(kind=kind, feature_loss_weight=0, dtype="float32")  # type: ignore[arg-type]
    head = new_head(SHAPES[kind], Counting().embedding, settings, 1, None, None)
    folder.mkdir()
    write_head(folder, head, trained_weights(head), "ab" * 32, "float32")
    return folder


def learning(folder: Path, learning_rate: float = 5e-3) -> OnlineHead:
    verifier = Counting()
    return OnlineHead(folder, verifier.embedding, verifier.lm_head, learning_rate, 0.25)


def feed(head: OnlineHead, num_texts: int, length: int = 60) -> None:
    """Let it learn from texts, one after the other."""
    width = (1 + len(head.feature_layers)) * WIDTH
    for first in range(num_texts):
        head.add(*Counting().text(7 * first, length, width), num_prompt=10)
        while head.work():
            pass


@pytest.mark.parametrize("kind", SHAPES)
def test_it_drafts_better_for_texts_that_it_has_not_seen(tmp_path: Path, kind: str) -> None:
    folder = written(tmp_path / "head", kind)
    head = learning(folder)
    assert not head.is_better
    feed(head, 60)
    assert head.is_better
    assert head.served.tokens_a_round < 1.5 < 2.5 < head.learned.tokens_a_round
    head.write(tmp_path / "learned")
    head.serve_learned()
    assert not head.is_better
    again = learning(tmp_path / "learned")
    feed(again, 1)
    assert again.served.tokens_a_round > 3
    assert again._trained_for == "ab" * 32


def test_what_has_learned_nothing_is_not_better(tmp_path: Path) -> None:
    head = learning(written(tmp_path / "head", "eagle2"), 1e-12)
    feed(head, 30)
    assert head.num_steps > 0
    assert not head.is_better
    assert head.learned.tokens_a_round == pytest.approx(head.served.tokens_a_round, abs=0.05)


def test_what_has_become_worse_begins_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(online, "_LOSING_TOKENS", 400)
    begun_again = []
    begin_again = OnlineHead._begin_again

    def counted(head: OnlineHead) -> None:
        begun_again.append((head.served.tokens_a_round, head.learned.tokens_a_round))
        begin_again(head)
        for served, own in zip(head._serving.parameters(), head._head.parameters(), strict=True):
            assert torch.equal(served, own)

    monkeypatch.setattr(OnlineHead, "_begin_again", counted)
    good = learning(written(tmp_path / "head", "eagle2"))
    feed(good, 60)
    assert not begun_again
    good.write(tmp_path / "good")
    feed(learning(tmp_path / "good", 0.1), 30)
    assert begun_again
    assert all(learned <= served for served, learned in begun_again)


def test_work_and_memory_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head = learning(written(tmp_path / "head", "eagle2"))
    feed(head, 3)
    num_answer = 3 * 50
    assert PASSES * num_answer <= head.num_tokens < PASSES * num_answer + 3 * 64
    assert not head.work()
    monkeypatch.setattr(online, "_MOST_TOKENS", 200)
    feed(head, 10)
    assert head._num_kept <= 200


def test_answers_of_a_few_tokens_are_left_out(tmp_path: Path) -> None:
    head = learning(written(tmp_path / "head", "eagle2"))
    for length, num_prompt in ((2, 0), (30, 30), (30, 15)):
        head.add(*Counting().text(0, length, WIDTH), num_prompt=num_prompt)
    assert not head.work()
    for length, num_prompt in ((18, 0), (30, 14), (400, 10)):
        head.add(*Counting().text(0, length, WIDTH), num_prompt=num_prompt)
    while head.work():
        pass
    assert head.num_tokens >= PASSES * (16 + 16 + 390)
    assert head.served.num_tokens == 16 + 16 + 384


def test_other_kinds_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "head"
    shape = replace(SMALL_SHAPE, kind="block", num_layers=1, num_positions=3)
    settings = HeadSettings(kind="block", dtype="float32")
    head = new_head(shape, Counting().embedding, settings, 1, None, None)
    folder.mkdir()
    write_head(folder, head, trained_weights(head), "ab" * 32, "float32")
    with pytest.raises(UserError, match=r"does not learn while it serves: .* is of kind block"):
        learning(folder)


def test_pieces_become_as_long_as_they_may_take() -> None:
    portion = Portion(0.2)
    assert portion.rows == 16
    for _ in range(3):
        portion.took(portion.rows, 0.1)
    assert portion.rows == 128
    portion.took(16, 10.0)  # the end of a text
    portion.took(128, 0.15)
    assert portion.rows == 128
    portion.took(128, 9.0)  # once
    assert portion.rows == 128
    for rows in (128, 64, 32, 16):
        slow = Portion(0.2)
        slow.rows = rows
        slow.took(rows, 5.0)
        assert slow.rows == max(rows // 2, 16)
