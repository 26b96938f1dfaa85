"""A head that learns from answers as they are given, a short piece of work at a time.

As in Online Speculative Decoding (Liu et al., arXiv 2310.07177): the texts that a server writes are
those that its head should draft. A text is judged before it is learned from, by the weights that
serve and by those that learn, so that each has drafted for texts that it had not seen.

Shapes: T = tokens of a text, R = rows of a piece, S = unrolled steps, H = hidden size,
W = width of the verifier's states, V = vocabulary.
"""

import copy
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.checkpoints.config import read_config
from polybasic.chain.formats.lineage import TRAINED_FOR_KEY
from polybasic.chain.formats.origin import recorded
from polybasic.chain.kernels.product_times import DTYPES
from polybasic.train.data.batches import LocalBatch
from polybasic.train.dtypes import settled
from polybasic.train.features.head_shape import HeadShape
from polybasic.train.features.lm_head import LmHead
from polybasic.train.features.states import Features
from polybasic.train.head.eagle2 import DraftHead
from polybasic.train.head.files import write_head
from polybasic.train.head.loss_module import LossModule
from polybasic.train.head.losses import UnrolledLoss, step_weights
from polybasic.train.head.start import new_head, trained_weights
from polybasic.train.head_optimizer import HeadOptimizer
from polybasic.train.settings import HeadSettings

LEARNING_KINDS = ("eagle2", "eagle3")
"""Heads whose rows predict the next state."""
PASSES = 4
"""Times that a text's rows are learned from."""
_MOST_TOKENS = 1 << 14
"""Of the texts that are kept."""
SIZES = (16, 32, 64, 128, 256)
"""Rows of a piece of work: few sizes, because PyTorch keeps code and memory for each."""
_CONTEXT = 256
"""Tokens before a piece's own, which its rows see."""
_BATCH_ROWS = 128
"""Between two steps of the optimizer."""
_JUDGED_TOKENS = 1024
"""For which weights have drafted before they are compared."""
_GAIN = 1.02
"""By which weights that take the place of others are better."""
_LOSING_TOKENS = 4 * _JUDGED_TOKENS
"""After which weights that are still no better than those that serve begin from these again."""


@dataclass
class _Text:
    """A text with its verifier's states.

    Attributes:
        token_ids: int64 [T].
        states: [T, W].
        first: row that predicts the answer's first token.
        num_judged: rows from there on.
        num_left: rows to learn from, each counted as often.
    """

    token_ids: Tensor
    states: Tensor
    first: int
    num_left: int
    num_judged: int = 0

    @property
    def num_rows(self) -> int:
        """That predict tokens of the answer."""
        return len(self.token_ids) - 2 - self.first

    @property
    def num_unjudged(self) -> int:
        return self.num_rows - self.num_judged


class Portion:
    """How many rows a piece of work has, so that whoever comes meanwhile does not wait long.

    Args:
        seconds: that a piece may take.

    Attributes:
        rows: of the next piece, of `SIZES`.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds, self.rows = seconds, SIZES[0]
        self._fastest: dict[int, float] = {}  # pieces: the first of a size takes longer

    def took(self, num_rows: int, seconds: float) -> None:
        """Learn from a piece, if it was a whole one."""
        if num_rows != self.rows:
            return
        fastest = min(seconds, self._fastest.get(num_rows, seconds))
        self._fastest[num_rows] = fastest
        place = SIZES.index(num_rows)
        if fastest > self._seconds and place > 0:
            self.rows = SIZES[place - 1]
        elif 2 * fastest <= self._seconds and place + 1 < len(SIZES):
            self.rows = SIZES[place + 1]


class DraftAccuracy:
    """How often drafts of some weights were right, over texts that they had not learned from.

    The latest texts count most.

    Args:
        num_steps: S.
    """

    def __init__(self, num_steps: int) -> None:
        self.num_tokens = 0
        self._right, self._counted = torch.zeros(num_steps), torch.zeros(num_steps)

    def add(self, agreement: Tensor, counts: Tensor) -> None:
        """Count the shares [S] of the tokens [S] of a piece."""
        if self._counted[0] > _JUDGED_TOKENS:
            self._right, self._counted = self._right / 2, self._counted / 2
        self._right += agreement.cpu() * counts.cpu()
        self._counted += counts.cpu()
        self.num_tokens += int(counts[0])

    @property
    def tokens_a_round(self) -> float:
        """Expected of greedy drafts that are a chain of S tokens, the verifier's own included."""
        shares = self._right / self._counted.clamp(min=1)
        return 1 + float(shares.cumprod(0).sum())


class OnlineHead:
    """A head in training beside the one that serves, which has the weights of an earlier moment.

    Args:
        folder: of the head that it starts from, EAGLE-2's or EAGLE-3's.
        embedding: [V, H], the verifier's.
        lm_head: the verifier's.
        learning_rate: AdamW's.
        piece_seconds: that a piece of work may take.

    Attributes:
        served, learned: what the weights that serve and those that learn were worth.
        num_steps: of the optimizer.
        num_tokens: of answers that were learned from.

    Raises:
        UserError: a head of another kind, or one that does not fit.
    """

    def __init__(
        self,
        folder: Path,
        embedding: Tensor,
        lm_head: LmHead,
        learning_rate: float,
        piece_seconds: float,
    ) -> None:
        file = read_config(folder)
        config, self._trained_for = file.head, recorded(file.content, TRAINED_FOR_KEY) or ""
        if config.kind not in LEARNING_KINDS:
            raise UserError(
                "head that does not learn while it serves",
                f"{folder} is of kind {config.kind}",
                f"serve a chain with a head of kind {' or '.join(LEARNING_KINDS)}, or train "
                "this one by a recipe",
            )
        layers = config.feature_layers or None
        self._settings = settled(
            HeadSettings(
                kind=config.kind,
                feature_layers=layers,
                learning_rate=learning_rate,
                **({} if config.kind == "eagle2" else {"feature_loss_weight": 0}),
            )
        )
        shape = HeadShape(
            config.vocab_size,
            config.hidden_size,
            config.intermediate_size,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            config.rms_norm_eps,
            config.rope,
            config.context_tokens,
            kind=config.kind,
            feature_layers=layers,
        )
        head = new_head(shape, embedding, self._settings, 0, folder, None)
        head.to(DTYPES[self._settings.dtype])
        self._lm_head, self._head = lm_head.to(head.dtype), head
        # the table is not learned: one for both
        shared = {id(head.embed_tokens): head.embed_tokens}
        self._serving: DraftHead = copy.deepcopy(head, shared).requires_grad_(False)
        self._weights = [each for each in head.parameters() if each.requires_grad]
        self._optimizer = HeadOptimizer([], self._weights, self._settings)
        self._texts: deque[_Text] = deque()
        self._portion = Portion(piece_seconds)
        self._num_gathered = 0
        self._scales: Tensor | None = None
        self._random = torch.Generator().manual_seed(0)
        self.served, self.learned = self._new_judged(), self._new_judged()
        self.num_steps = self.num_tokens = 0

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """The verifier's, whose inputs an EAGLE-3 head reads beside the state after the final
        norm."""
        return self._head.shape.feature_layers or ()

    def add(self, token_ids: Tensor, states: Tensor, num_prompt: int) -> None:
        """Take a text to learn from, unless its answer is very short; the oldest gives way.

        Args:
            token_ids: int64 [T].
            states: [T, W], the verifier's.
            num_prompt: tokens before the answer.
        """
        first = max(num_prompt - 2, 0)
        num_rows = len(token_ids) - 2 - first
        if num_rows < SIZES[0]:
            return
        if self._scales is None:
            own = states[:, : self._head.shape.hidden_size].float()
            scales = own.square().mean(0).sqrt()
            self._scales = scales.clamp(min=0.01 * float(scales.median()))
        self._texts.append(_Text(token_ids, states, first, PASSES * num_rows))
        while len(self._texts) > 1 and self._num_kept > _MOST_TOKENS:
            self._texts.popleft()

    def work(self) -> bool:
        """Do a piece of work; False if there is none."""
        began = time.perf_counter()
        unjudged = next((text for text in self._texts if text.num_unjudged >= SIZES[0]), None)
        if unjudged is not None:
            num_rows = self._judge(unjudged)
            if self._is_lost:
                self._begin_again()
        else:
            unlearned = [text for text in self._texts if text.num_left > 0]
            if not unlearned:
                return False
            place = int(torch.randint(len(unlearned), (), generator=self._random))
            num_rows = self._learn(unlearned[place])
        self._portion.took(num_rows, time.perf_counter() - began)
        return True

    @property
    def is_better(self) -> bool:
        """Whether the weights that learn have drafted better than those that serve."""
        is_known = self.learned.num_tokens >= _JUDGED_TOKENS
        return is_known and (self.learned.tokens_a_round > _GAIN * self.served.tokens_a_round)

    def write(self, folder: Path) -> None:
        """Write the weights that learn as a head.

        Raises:
            UserError: the disk is full or not writable.
        """
        weights, dtype = trained_weights(self._head), self._settings.dtype
        write_head(folder, self._head, weights, self._trained_for, dtype)

    @torch.no_grad()
    def serve_learned(self) -> None:
        """From now on the weights that learn are those that serve."""
        for serving, learned in zip(
            self._serving.parameters(), self._head.parameters(), strict=True
        ):
            serving.copy_(learned)
        self.served, self.learned = self._new_judged(), self._new_judged()

    @property
    def _is_lost(self) -> bool:
        """Whether what was learned has been of no use for long."""
        is_known = self.learned.num_tokens >= _LOSING_TOKENS
        return is_known and self.learned.tokens_a_round <= self.served.tokens_a_round

    def _begin_again(self) -> None:
        """Learn on from the weights that serve."""
        self._head.load_state_dict(self._serving.state_dict())
        self._optimizer = HeadOptimizer([], self._weights, self._settings)
        self._drop_gradient()
        self.served, self.learned = self._new_judged(), self._new_judged()

    @property
    def _num_kept(self) -> int:
        """Tokens of all texts."""
        return sum(len(text.token_ids) for text in self._texts)

    def _new_judged(self) -> DraftAccuracy:
        return DraftAccuracy(self._settings.unroll_steps)

    def _piece(self, text: _Text, first: int, num_rows: int) -> tuple[LocalBatch, Features, Tensor]:
        """Tokens that rows from `first` on read and predict, with those before them, and the counts
        [S] of its steps. They are padded to as many in all pieces of so many rows."""
        end, size = first + 2 + num_rows, _CONTEXT + num_rows + 2
        part = slice(max(end - size, 0), end)
        num_padded = size - (end - part.start)
        states = F.pad(text.states[part], (0, 0, 0, num_padded))[None]
        token_ids = F.pad(text.token_ids[part], (0, num_padded))[None]
        is_counted = torch.zeros_like(token_ids, dtype=torch.bool)
        is_counted[:, first - part.start + 2 : end - part.start] = True
        width = self._head.shape.hidden_size
        layers = states[..., width:] if states.shape[-1] > width else None
        counts = step_weights(is_counted[:, 2:], self._settings.unroll_steps).sum(dim=(1, 2))
        share = LocalBatch(token_ids, is_counted, range(1))
        return share, Features(states[..., :width], layers), counts

    def _judge(self, text: _Text) -> int:
        num_rows = self._fitting(text.num_unjudged)
        share, features, counts = self._piece(text, text.first + text.num_judged, num_rows)
        with torch.no_grad():
            for head, judged in (self._serving, self.served), (self._head, self.learned):
                judged.add(self._loss(head, share, features, counts).agreement, counts)
        text.num_judged += num_rows
        return num_rows

    def _learn(self, text: _Text) -> int:
        num_rows = self._fitting(text.num_rows)
        above = text.num_rows - num_rows + 1
        first = text.first + int(torch.randint(above, (), generator=self._random))
        share, features, counts = self._piece(text, first, num_rows)
        loss = self._loss(self._head, share, features, counts)
        (loss.total * (num_rows / _BATCH_ROWS)).backward()
        text.num_left -= num_rows
        self.num_tokens += num_rows
        self._num_gathered += num_rows
        if self._num_gathered >= _BATCH_ROWS:
            self._step()
        return num_rows

    def _fitting(self, num_rows: int) -> int:
        """The rows of a piece of at most so many."""
        return max(size for size in SIZES if size <= min(num_rows, self._portion.rows))

    def _loss(
        self, head: DraftHead, share: LocalBatch, features: Features, counts: Tensor
    ) -> UnrolledLoss:
        module = LossModule(head, self._settings, self._scales)
        noise = torch.zeros(module.noise_shape(features))
        loss: UnrolledLoss = module(share, features, self._lm_head, noise, counts)
        return loss

    def _step(self) -> None:
        torch.nn.utils.clip_grad_norm_(self._weights, self._settings.clip_grad_norm)
        self._optimizer.step()
        self.num_steps += 1
        self._drop_gradient()

    def _drop_gradient(self) -> None:
        for weight in self._weights:
            weight.grad = None
        self._num_gathered = 0
