"""Accepted length, simulated: what the runtime's draft tree would gain on held-out prompts.

The text that is drafted for is the target's own greedy answer, generated once before training,
because this is what a greedy server writes; a conversation's ready-made answer would leave the
target's path at the first token where they differ. Along this answer rounds are played by the
runtime's code: the head reads the new rows, its executor drafts, the best candidates make a tree,
and the walk draws the answer's tokens. What differs from serving: the target's rounding (passes
over other numbers of rows), a head that is not rounded to 4 bits, and that an intermediate in 4
bits is taken to agree with the target, or where the answers are its own, the target with it.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import GenerationConfig

from polybasic.chain.base.errors import UserError
from polybasic.chain.kernels.cuda.graphs import Graphs
from polybasic.chain.kernels.drafts import DraftTree, walk
from polybasic.chain.kernels.executor import Executor, Layers
from polybasic.chain.kernels.rows import consecutive_rows
from polybasic.train.data.chat import RefusedConversation, encode_prompt
from polybasic.train.features.head_shape import FeatureLayers
from polybasic.train.features.lm_head import LmHead
from polybasic.train.features.states import Features
from polybasic.train.features.target import Target
from polybasic.train.head.eagle2 import DraftHead
from polybasic.train.head.early_exit import EarlyExit
from polybasic.train.head.served import served_head
from polybasic.train.head.steering import Steering

NO_TASK = "other"
"""Stands for the task of a conversation that names none."""

_BATCH = 16
_END = -1  # what an answer goes on with: no draft has it


@dataclass(frozen=True)
class TreeShape:
    """The runtime's tree: levels of candidates, beams a level, rows verified (root included)."""

    depth: int
    top_k: int
    rows: int


@dataclass(frozen=True)
class HeldoutBatch:
    """Prompts with the target's greedy answers, right-padded, and the target's features."""

    token_ids: Tensor
    """[B, T]"""
    features: Features
    prompt_lengths: Tensor
    """[B]"""
    lengths: Tensor
    """[B], prompt and answer"""
    tasks: list[str]
    """B names of what the conversations are about"""

    @property
    def is_token(self) -> Tensor:
        """bool [B, T], false in the padding."""
        places = torch.arange(self.token_ids.shape[1], device=self.lengths.device)
        return places < self.lengths[:, None]


@dataclass(frozen=True)
class Acceptance:
    """What the simulation found."""

    accepted_length: float
    """tokens a round, the target's own last one included"""
    num_rounds: int
    accepted_by_depth: list[float]
    """the share of rounds whose first d drafted tokens were accepted, for d = 1 .. depth"""
    by_task: dict[str, float]
    """tokens a round, by the task of the conversation, in the order of their names"""


def heldout_batches(
    target: Target,
    conversations: Iterable[dict[str, Any]],
    max_tokens: int,
    answer_tokens: int,
    feature_layers: FeatureLayers | None = None,
) -> list[HeldoutBatch]:
    """Let the target answer held-out prompts greedily; keep its features for all evaluations.

    A prompt is a conversation up to its last assistant turn that leaves a prompt of at most
    `max_tokens`. Memory: features of `max_tokens + answer_tokens` states a conversation.

    Args:
        target: whose answers are drafted for, or the intermediate that verifies the head.
        conversations: rows with messages and, where they have one, a task.
        max_tokens: of a prompt.
        answer_tokens: of an answer, at most.
        feature_layers: of an EAGLE-3 head.

    Raises:
        UserError: no prompt fits, or no answer is longer than one token.
    """
    prompts = [
        _Prompt(token_ids, row.get("task") or NO_TASK)
        for row in conversations
        if (token_ids := _longest_prompt(target, row["messages"], max_tokens)) is not None
    ]
    prompts.sort(key=lambda prompt: len(prompt.token_ids))
    batches = [
        _answered(target, prompts[start : start + _BATCH], answer_tokens, feature_layers)
        for start in range(0, len(prompts), _BATCH)
    ]
    if not any(bool((batch.lengths - batch.prompt_lengths > 1).any()) for batch in batches):
        raise UserError(
            "nothing to evaluate on",
            f"{len(prompts)} held-out prompts of at most {max_tokens} tokens, and no answer "
            "of the target longer than one token",
            "raise data.max_tokens or data.num_heldout, or check the target and its chat template",
        )
    return batches


@torch.no_grad()
def simulate(
    head: DraftHead,
    lm_head: LmHead,
    batches: Sequence[HeldoutBatch],
    tree: TreeShape,
    trimmed: bool = True,
) -> Acceptance:
    """Play every round of every held-out answer; deterministic.

    Args:
        head: in any dtype that models are served in.
        lm_head: the verifier's.
        batches: from `heldout_batches`.
        tree: as it will be served.
        trimmed: whether a head with a draft vocabulary drafts among it; one of EAGLE-2 can draft
            among all tokens too.
    """
    longest = max(batch.token_ids.shape[1] for batch in batches)
    capacity = longest + tree.depth * tree.top_k
    drafter = served_head(head, lm_head, capacity, trimmed)
    drafter.capture_by(Graphs(drafter.device))
    if drafter.max_levels is not None:
        tree = replace(tree, depth=min(tree.depth, drafter.max_levels))
    config, counts = drafter.config, _Counts()
    rows = (2 * config.num_kv_heads, capacity, config.head_dim)
    cache = [
        torch.zeros(rows, dtype=drafter.dtype, device=drafter.device)
        for _ in drafter.weights.layers
    ]
    # a row of a head reads the state of one token and the token after it
    lag = 0 if isinstance(head, EarlyExit | Steering) else 1
    for batch in batches:
        inputs = head.source(batch.features).to(drafter.dtype)
        if isinstance(head, Steering):
            inputs = F.pad(inputs[:, :-1], (0, 0, 1, 0))  # of the token before
        for row, task in enumerate(batch.tasks):
            token_ids = batch.token_ids[row, : batch.lengths[row]]
            last = int(batch.prompt_lengths[row])
            read = None if isinstance(head, EarlyExit) else inputs[row]
            for accepted, gained in _rounds(drafter, cache, token_ids, last, read, tree, lag):
                counts.add(task, accepted, gained)
    return counts.acceptance(tree.depth)


def _rounds(
    drafter: Executor,
    cache: Layers,
    token_ids: Tensor,
    last: int,
    inputs: Tensor | None,
    tree: TreeShape,
    lag: int,
) -> Iterator[tuple[int, int]]:
    """How many drafted tokens each round along an answer accepts, and the tokens that it gains.

    Args:
        token_ids: [T], prompt and answer.
        last: index of the newest token, which no pass has read yet.
        inputs: [T, W], what the head reads of the verifier's passes; None of a model that reads
            tokens alone.
        lag: tokens before the first one that the model reads.
    """
    weights = drafter.weights
    depth = min(tree.depth, weights.max_levels or tree.depth)
    num_ahead = weights.rows_ahead(depth)
    tokens, num_read = token_ids.tolist(), 0
    while following := tokens[last + 1 :]:
        end = last + 1 - lag
        features = None if inputs is None else drafter.features(inputs[num_read:end])
        if features is not None and weights.positions is not None:
            features = weights.positions.with_rows_ahead(features, num_ahead)
        read = token_ids[num_read + lag : last + 1]
        states = drafter.forward(
            torch.cat([read, read[-1:].expand(num_ahead)]),
            [cache],
            [consecutive_rows(num_read, len(read) + num_ahead)],
            features,
        )
        candidates = drafter.draft(states[-1 - num_ahead :], cache, end, depth, tree.top_k)
        accepted = _accepted(candidates.keep_best(tokens[last], tree.rows), following)
        gained = min(accepted + 1, len(following))
        yield accepted, gained
        num_read, last = end, last + gained


def _accepted(tree: DraftTree, following: list[int]) -> int:
    """How many drafted tokens the answer confirms; `following` are its next ones."""
    drawn = iter([*following, _END])
    path, _ = walk(tree, lambda _: next(drawn))
    return len(path) - 1


class _Counts:
    """Rounds and what they gained, in all and by task."""

    def __init__(self) -> None:
        self._rounds, self._tokens = Counter[str](), Counter[str]()
        self._accepted = Counter[int]()

    def add(self, task: str, accepted: int, gained: int) -> None:
        self._rounds[task] += 1
        self._tokens[task] += gained
        self._accepted[accepted] += 1

    def acceptance(self, depth: int) -> Acceptance:
        num_rounds = self._rounds.total()
        at_least = [
            sum(count for accepted, count in self._accepted.items() if accepted >= level)
            for level in range(1, depth + 1)
        ]
        return Acceptance(
            self._tokens.total() / num_rounds,
            num_rounds,
            [round(count / num_rounds, 4) for count in at_least],
            {task: self._tokens[task] / self._rounds[task] for task in sorted(self._rounds)},
        )


class _Prompt(NamedTuple):
    """What a held-out conversation is answered from."""

    token_ids: list[int]
    task: str


def _longest_prompt(
    target: Target, messages: list[dict[str, str]], max_tokens: int
) -> list[int] | None:
    for index in range(len(messages) - 1, 0, -1):
        if messages[index]["role"] == "assistant":
            try:
                prompt = encode_prompt(target.tokenizer, messages[:index])
            except RefusedConversation:
                continue  # counted by `heldout_batches`, which refuses to have none
            if len(prompt) <= max_tokens:
                return prompt
    return None


@torch.no_grad()
def _answered(
    target: Target,
    prompts: list[_Prompt],
    answer_tokens: int,
    feature_layers: FeatureLayers | None,
) -> HeldoutBatch:
    device, width = target.device, max(len(prompt.token_ids) for prompt in prompts)
    padded = torch.zeros(len(prompts), width, dtype=torch.long)
    mask = torch.zeros_like(padded)
    for row, (prompt, _) in enumerate(prompts):
        padded[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    ends = _stop_tokens(target)
    model: Any = target.model  # its generate is typed as a tensor
    # what the checkpoint would add of its own: sampling, penalties, suppressed tokens
    own_defaults, model.generation_config = model.generation_config, GenerationConfig()
    generated = model.generate(
        input_ids=padded.to(device),
        attention_mask=mask.to(device),
        max_new_tokens=answer_tokens,
        do_sample=False,
        eos_token_id=ends or None,
        pad_token_id=0,
    )[:, width:].tolist()
    model.generation_config = own_defaults
    sequences = [
        prompt + _cut(answer, ends) for (prompt, _), answer in zip(prompts, generated, strict=True)
    ]
    token_ids = torch.zeros(len(prompts), max(map(len, sequences)), dtype=torch.long)
    for row, sequence in enumerate(sequences):
        token_ids[row, : len(sequence)] = torch.tensor(sequence)
    token_ids = token_ids.to(device)
    return HeldoutBatch(
        token_ids=token_ids,
        features=target.features(token_ids, feature_layers=feature_layers),
        prompt_lengths=torch.tensor([len(prompt) for prompt, _ in prompts], device=device),
        lengths=torch.tensor([len(sequence) for sequence in sequences], device=device),
        tasks=[task for _, task in prompts],
    )


def _stop_tokens(target: Target) -> list[int]:
    """As when serving: of the generation config, or the model's, and the tokenizer's."""
    found = target.model.generation_config.eos_token_id
    if found is None:
        found = getattr(target.model.config, "eos_token_id", None)
    ends = found if isinstance(found, list) else [found]
    return sorted({each for each in (*ends, target.tokenizer.eos_token_id) if each is not None})


def _cut(answer: list[int], ends: list[int]) -> list[int]:
    """The answer up to its first end-of-sequence token, which it keeps."""
    for position, token_id in enumerate(answer):
        if token_id in ends:
            return answer[: position + 1]
    return answer
