"""Accepted length, simulated: what the runtime's draft tree would gain on held-out prompts.

The text that is drafted for is the target's own greedy answer, generated once before training,
because this is what a greedy server writes; a conversation's ready-made answer would leave the
target's path at the first token where they differ. Along this answer rounds are played as the
runtime plays them: draft a tree from the head's cache of true rows, rank it, keep the best rows,
walk it along the answer, add the target's own token, start the next round there. No beam or row
is approximated. What differs from serving: the target's rounding (passes over other numbers of
rows), and that an intermediate in 4 bits is taken to agree with the target, or where the answers
are its own, the target with it.

Shapes: B = conversations, K = beams (top_k), C = committed rows, P = nodes in the pool.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import GenerationConfig

from polybasic.chain.errors import UserError
from polybasic.train.data.chat import RefusedConversation, encode_prompt
from polybasic.train.features.head_shape import FeatureLayers
from polybasic.train.features.lm_head import LmHead
from polybasic.train.features.states import Features
from polybasic.train.features.target import Target
from polybasic.train.head.eagle2 import DraftHead
from polybasic.train.head.layers import KeysValues

NO_TASK = "other"
"""Stands for the task of a conversation that names none."""

_BATCH = 16


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
        head: in any dtype.
        lm_head: the verifier's.
        batches: from `heldout_batches`.
        tree: as it will be served.
        trimmed: whether a head with a draft vocabulary drafts among it; one of EAGLE-2 can draft
            among all tokens too.
    """
    drafter = _Drafter(head, lm_head, trimmed)
    counts = _Counts(tree.depth)
    for batch in batches:
        features = head.read(batch.features)
        positions = torch.arange(features.shape[1] - 1, device=features.device)
        outputs, cache = head(batch.token_ids[:, 1:], features[:, :-1], positions)
        last = batch.prompt_lengths.clone()  # the newest token, which no pass has read yet
        while bool((active := last < batch.lengths - 1).any()):
            drafted = _draft(drafter, outputs, cache, last, tree)
            accepted = _walk(drafted, batch.token_ids, last, tree)
            accepted = torch.minimum(accepted, batch.lengths - 1 - last)
            gained = torch.minimum(accepted + 1, batch.lengths - 1 - last)
            counts.add(batch.tasks, active, gained, accepted)
            last = torch.where(active, last + gained, last)
    return counts.acceptance()


class _Counts:
    """Rounds and what they gained, in all and by task."""

    def __init__(self, depth: int) -> None:
        self._by_depth = torch.zeros(depth, dtype=torch.long)
        self._rounds, self._tokens = Counter[str](), Counter[str]()

    def add(self, tasks: list[str], active: Tensor, gained: Tensor, accepted: Tensor) -> None:
        """Rounds played side by side, those that are `active`; the tensors are [B]."""
        for task, is_active, num_tokens in zip(
            tasks, active.tolist(), gained.tolist(), strict=True
        ):
            if is_active:
                self._rounds[task] += 1
                self._tokens[task] += num_tokens
        depths = torch.arange(1, len(self._by_depth) + 1, device=accepted.device)
        self._by_depth += (accepted[active, None] >= depths).sum(dim=0).cpu()

    def acceptance(self) -> Acceptance:
        num_rounds = self._rounds.total()
        return Acceptance(
            self._tokens.total() / num_rounds,
            num_rounds,
            [round(count / num_rounds, 4) for count in self._by_depth.tolist()],
            {task: self._tokens[task] / self._rounds[task] for task in sorted(self._rounds)},
        )


class _Drafter:
    """A head with the projection that it drafts through."""

    def __init__(self, head: DraftHead, lm_head: LmHead, trimmed: bool) -> None:
        assert trimmed or head.shape.kind == "eagle2", "an EAGLE-3 head has its own lm_head"
        self.head = head
        lm_head = lm_head.to(head.dtype)
        self._projection = head.projection(lm_head) if trimmed else lm_head
        self._is_trimmed = trimmed

    def best(self, outputs: Tensor, num: int) -> tuple[Tensor, Tensor]:
        """Log-probabilities and the target's ids of the best tokens after outputs [..., H]."""
        logits = self._projection(self.head.projected(outputs))
        scores, tokens = logits.float().log_softmax(dim=-1).topk(num)
        return scores, self.head.target_token_ids(tokens) if self._is_trimmed else tokens


@dataclass(frozen=True)
class _Pool:
    """All drafted nodes in order of depth; parents come before their children. Each [B, P]."""

    tokens: Tensor
    scores: Tensor
    parents: Tensor
    """index into the pool, -1 for children of the root"""


def _draft(
    drafter: _Drafter, outputs: Tensor, cache: KeysValues, last: Tensor, tree: TreeShape
) -> _Pool:
    """Draft one tree for each conversation.

    Args:
        outputs: [B, C, H], the head's outputs over true rows.
        cache: of the same rows; each conversation uses those before row `last`.
        last: [B], index of the newest token; its row does not exist yet.
    """
    num, device, top_k = len(last), last.device, tree.top_k
    committed = torch.arange(outputs.shape[1], device=device) < last[:, None]  # [B, C]
    feature = outputs[torch.arange(num, device=device), last - 1][:, None]  # [B, 1, H]
    scores, tokens = drafter.best(feature[:, 0], top_k)
    pool = [(tokens, scores, torch.full_like(tokens, -1))]
    beams = torch.arange(top_k, device=device).expand(num, top_k)  # pool index of each beam
    features = feature.expand(num, top_k, -1)
    ancestors = torch.zeros(num, top_k, 0, dtype=torch.bool, device=device)
    own = torch.eye(top_k, dtype=torch.bool, device=device).expand(num, top_k, top_k)
    for depth in range(1, tree.depth):
        ancestors = torch.cat((ancestors, own), dim=2)
        mask = torch.cat((committed[:, None].expand(num, top_k, -1), ancestors), dim=2)
        row_positions = (last + depth - 1)[:, None].expand(num, top_k)
        states, cache = drafter.head(tokens, features, row_positions, cache, mask[:, None])
        child_scores, child_tokens = drafter.best(states, top_k)
        child_scores = (scores[:, :, None] + child_scores).flatten(1)  # [B, K * K]
        child_tokens = child_tokens.flatten(1)
        parents = beams.repeat_interleave(top_k, dim=1)
        scores, chosen = child_scores.topk(top_k)
        beams = sum(part[0].shape[1] for part in pool) + chosen
        pool.append((child_tokens, child_scores, parents))
        tokens = child_tokens.gather(1, chosen)
        origin = chosen // top_k  # which of the beams a new beam continues
        features = states.gather(1, origin[:, :, None].expand(-1, -1, states.shape[2]))
        ancestors = ancestors.gather(1, origin[:, :, None].expand(-1, -1, ancestors.shape[2]))
    return _Pool(*(torch.cat(parts, dim=1) for parts in zip(*pool, strict=True)))


def _walk(pool: _Pool, token_ids: Tensor, last: Tensor, tree: TreeShape) -> Tensor:
    """How many drafted tokens of each conversation the answer confirms, [B]."""
    order = pool.scores.argsort(dim=1, descending=True, stable=True)[:, : tree.rows - 1]
    is_kept = torch.zeros_like(pool.tokens, dtype=torch.bool).scatter(1, order, True)
    current = torch.full_like(last, -1)
    accepted = torch.zeros_like(last)
    alive = torch.ones_like(last, dtype=torch.bool)
    for depth in range(1, tree.depth + 1):
        where = (last + depth).clamp(max=token_ids.shape[1] - 1)
        wanted = token_ids.gather(1, where[:, None])
        fits = is_kept & (pool.parents == current[:, None]) & (pool.tokens == wanted)
        alive = alive & fits.any(dim=1)
        accepted += alive
        current = fits.int().argmax(dim=1)
    return accepted


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
