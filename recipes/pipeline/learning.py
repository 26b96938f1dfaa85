"""A chain's head that learns from the answers of its server: what reads, learns, writes and serves.

Liu et al., "Online Speculative Decoding" (arXiv 2310.07177), with three differences: answers are
learned from only while nobody waits for one, weights take the place of others only where they have
drafted better for answers that neither had learned from, and what was learned is kept beside the
chain.
"""

import logging
import time
from collections import deque

import torch

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.checkpoints.kinds import is_head
from polybasic.chain.formats.learned import Learned, learned_folder, read_learned, writing_learned
from polybasic.chain.formats.manifest import Member
from polybasic.chain.model.stored import StoredTensors
from polybasic.deploy.runtime.chain import Chain
from polybasic.deploy.runtime.learned import AnswerReader, load_drafter
from polybasic.deploy.serve.learning import Progress
from polybasic.train.features.lm_head import LmHead
from polybasic.train.head.online import DraftAccuracy, OnlineHead, Portion

_log = logging.getLogger(__name__)

_MAX_TOKENS = 4096
"""Of an answer with its prompt; longer ones are not learned from."""
_MAX_WAITING = 32
"""Answers that were not read again yet; of more the oldest are forgotten."""
LEARNING_RATE = 3e-5
"""Of ready heads, which forget by larger ones what they know."""
PIECE_SECONDS = 0.25
"""That a request may have to wait."""


class ChainLearner:
    """Learns from answers of a chain, a `polybasic.deploy.serve.learning.Learner`.

    Args:
        chain: loaded, on a CPU, in one process.

    Raises:
        UserError: no head of the plan can learn, or not here.
    """

    def __init__(self, chain: Chain) -> None:
        self._chain = chain
        member = _learning_member(chain)
        self._name = member.name
        models = chain.engine.models
        verifiers = [name for name in chain.plan.members if name in member.drafts_for]
        verifier = verifiers[-1] if verifiers else next(iter(models.decoders))
        learned = read_learned(chain.folder)
        if learned is not None and learned.fits(chain.manifest):
            folder, self._before = learned_folder(chain.folder), learned
        else:
            folder = chain.member_folders[self._name]
            self._before = Learned(
                member=self._name,
                files=member.files,
                num_answers=0,
                num_tokens=0,
                num_steps=0,
                tokens_a_round=(1.0, 1.0),
            )
        target = models.target
        stored = StoredTensors(chain.target_folder, target.dtype, target.device)
        embedding = stored.stored("model.embed_tokens.weight").to(target.dtype)
        projection = embedding
        if not target.config.tie_word_embeddings:
            projection = stored.stored("lm_head.weight").to(target.dtype)
        lm_head = LmHead(projection, target.weights.logit_softcap)
        self._online = OnlineHead(folder, embedding, lm_head, LEARNING_RATE, PIECE_SECONDS)
        self._max_tokens = min(_MAX_TOKENS, models.context_tokens)
        layers = self._online.feature_layers
        self._reader = AnswerReader(chain, verifier, layers, self._max_tokens)
        self._reading = Portion(PIECE_SECONDS)
        self._waiting: deque[tuple[list[int], int]] = deque(maxlen=_MAX_WAITING)
        self._text: tuple[list[int], int] | None = None
        self._num_answers = self._num_heads = 0

    @property
    def progress(self) -> Progress:
        """See `Learner`."""
        online = self._online
        served, learned = _known(online.served), _known(online.learned)
        return Progress(online.num_tokens, self._num_heads, served, learned)

    @property
    def about(self) -> str:
        """A line of what it does."""
        folder = learned_folder(self._chain.folder)
        return f"learning: {self._name}, while nobody asks; what is better is kept in {folder}"

    def add(self, prompt: list[int], answer: list[int]) -> None:
        """See `Learner`."""
        if len(prompt) + len(answer) <= self._max_tokens:
            self._waiting.append((prompt + answer, len(prompt)))

    def work(self) -> bool:
        """See `Learner`."""
        if self._text is None and self._waiting:
            self._text = self._waiting.popleft()
        if self._text is not None:
            self._read(*self._text)
            return True
        if not self._online.work():
            return False
        if self._online.is_better:
            self._serve()
        return True

    def _read(self, token_ids: list[int], num_prompt: int) -> None:
        """Read the next part of the text; after the last one it can be learned from."""
        began, first = time.perf_counter(), self._reader.num_read
        part = token_ids[first : first + self._reading.rows]
        self._reader.read(part)
        self._reading.took(len(part), time.perf_counter() - began)
        if first + len(part) == len(token_ids):
            self._online.add(torch.tensor(token_ids), self._reader.take(), num_prompt)
            self._num_answers += 1
            self._text = None

    def _serve(self) -> None:
        """Keep what was learned, and draft with it."""
        online, before = self._online, self._before
        gained = online.served.tokens_a_round, online.learned.tokens_a_round
        learned = before.model_copy(
            update={
                "num_answers": before.num_answers + self._num_answers,
                "num_tokens": before.num_tokens + online.num_tokens,
                "num_steps": before.num_steps + online.num_steps,
                "tokens_a_round": tuple(round(each, 4) for each in gained),
            }
        )
        with writing_learned(self._chain.folder, learned) as folder:
            online.write(folder)
        online.serve_learned()
        head = load_drafter(self._chain, self._name, learned_folder(self._chain.folder))
        self._chain.engine.exchange(self._name, head)
        self._num_heads += 1
        _log.info(
            "%s drafts with what it has learned from %d answers: %.2f tokens a round, %.2f before",
            self._name,
            learned.num_answers,
            *reversed(gained),
        )


def _learning_member(chain: Chain) -> Member:
    """The head that a chain's plan drafts with.

    Raises:
        UserError: there is none, or the chain runs where nothing is learned.
    """
    models, name = chain.engine.models, chain.plan.members[-1]
    where = None
    if models.remote is not None:
        where = "the target runs elsewhere"
    elif models.num_parts > 1:
        where = f"its models are divided among {models.num_parts} processes"
    elif models.device.type != "cpu":
        where = f"it runs on {models.device}"
    if where is not None:
        raise UserError(
            "learning while it serves needs a chain on a CPU, in one process", where, "drop --learn"
        )
    member = chain.manifest.member(name)
    if not is_head(member.kind):
        raise UserError(
            "no head that could learn",
            f"the plan of {chain.folder} drafts with {name}",
            "train one by a recipe, see docs/training.md, or drop --learn",
        )
    return member


def _known(judged: DraftAccuracy) -> float | None:
    return judged.tokens_a_round if judged.num_tokens else None
