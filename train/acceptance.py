"""Accepted length, simulated: what the runtime's draft tree would gain on held-out prompts.

The text that is drafted for is the target's own greedy answer, generated once before training,
because this is what a greedy server writes; a conversation's ready-made answer would leave the
target's path at the first token where they differ. Along this answer rounds are played as the
runtime plays them: draft a tree from the head's cache of true rows, rank it, keep the best rows,
walk it along the answer, add the target's own token, start the next round there. No beam or row
is approximated. What differs from serving: the target's rounding (passes over other numbers of
rows), and that an intermediate in 4 bits is taken to agree with the target.

Shapes: B = conversations, K = beams (top_k), C = committed rows, P = nodes in the pool.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from polybasic.chain.errors import UserError
from polybasic.train.chat import RefusedConversation, encode_prompt
from polybasic.train.head import DraftHead, KeysValues
from polybasic.train.target import LmHead, Target

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
    features: Tensor
    """[B, T, H]"""
    prompt_lengths: Tensor
    """[B]"""
    lengths: Tensor
    """[B], prompt and answer"""


@dataclass(frozen=True)
class Acceptance:
    """What the simulation found."""

    accepted_length: float
    """tokens a round, the target's own last one included"""
    num_rounds: int
    accepted_by_depth: list[float]
    """the share of rounds whose first d drafted tokens were accepted, for d = 1 .. depth"""


def heldout_batches(
    target: Target, conversations: Iterable[dict[str, Any]], max_tokens: int, answer_tokens: int
) -> list[HeldoutBatch]:
    """Let the target answer held-out prompts greedily; keep its features for all evaluations.

    A prompt is a conversation up to its last assistant turn that leaves a prompt of at most
    `max_tokens`. Memory: features of `max_tokens + answer_tokens` states a conversation.

    Raises:
        UserError: no prompt fits, or no answer is longer than one token.
    """
    prompts = [
        prompt
        for row in conversations
        if (prompt := _longest_prompt(target, row["messages"], max_tokens)) is not None
    ]
    prompts.sort(key=len)
    batches = [
        _answered(target, prompts[start : start + _BATCH], answer_tokens)
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
    head: DraftHead, lm_head: LmHead, batches: Sequence[HeldoutBatch], tree: TreeShape
) -> Acceptance:
    """Play every round of every held-out answer; deterministic.

    Args:
        head: in any dtype.
        lm_head: the target's.
        batches: from `heldout_batches`.
        tree: as it will be served.
    """
    num_rounds, num_tokens = 0, 0
    by_depth = torch.zeros(tree.depth, dtype=torch.long)
    dtype = head.fc.weight.dtype
    lm_head = lm_head.to(dtype)
    for batch in batches:
        features = batch.features.to(dtype)
        positions = torch.arange(features.shape[1] - 1, device=features.device)
        outputs, cache = head(batch.token_ids[:, 1:], features[:, :-1], positions)
        last = batch.prompt_lengths.clone()  # the newest token, which no pass has read yet
        while bool((active := last < batch.lengths - 1).any()):
            drafted = _draft(head, lm_head, outputs, cache, last, tree)
            accepted = _walk(drafted, batch.token_ids, last, tree)
            accepted = torch.minimum(accepted, batch.lengths - 1 - last)
            gained = torch.minimum(accepted + 1, batch.lengths - 1 - last)
            num_rounds += int(active.sum())
            num_tokens += int(gained[active].sum())
            depths = torch.arange(1, tree.depth + 1, device=last.device)
            by_depth += (accepted[active, None] >= depths).sum(dim=0).cpu()
            last = torch.where(active, last + gained, last)
    shares = [round(count / num_rounds, 4) for count in by_depth.tolist()]
    return Acceptance(num_tokens / num_rounds, num_rounds, shares)


@dataclass(frozen=True)
class _Pool:
    """All drafted nodes in order of depth; parents come before their children. Each [B, P]."""

    tokens: Tensor
    scores: Tensor
    parents: Tensor
    """index into the pool, -1 for children of the root"""


def _draft(
    head: DraftHead,
    lm_head: LmHead,
    outputs: Tensor,
    cache: KeysValues,
    last: Tensor,
    tree: TreeShape,
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
    scores, tokens = _log_probabilities(feature[:, 0], lm_head).topk(top_k)
    pool = [(tokens, scores, torch.full_like(tokens, -1))]
    beams = torch.arange(top_k, device=device).expand(num, top_k)  # pool index of each beam
    features = feature.expand(num, top_k, -1)
    ancestors = torch.zeros(num, top_k, 0, dtype=torch.bool, device=device)
    own = torch.eye(top_k, dtype=torch.bool, device=device).expand(num, top_k, top_k)
    for depth in range(1, tree.depth):
        ancestors = torch.cat((ancestors, own), dim=2)
        mask = torch.cat((committed[:, None].expand(num, top_k, -1), ancestors), dim=2)
        row_positions = (last + depth - 1)[:, None].expand(num, top_k)
        states, cache = head(tokens, features, row_positions, cache, mask[:, None])
        child_scores, child_tokens = _log_probabilities(states, lm_head).topk(top_k)
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


def _log_probabilities(features: Tensor, lm_head: LmHead) -> Tensor:
    return lm_head(features).float().log_softmax(dim=-1)


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
def _answered(target: Target, prompts: list[list[int]], answer_tokens: int) -> HeldoutBatch:
    device, width = target.device, max(map(len, prompts))
    padded = torch.zeros(len(prompts), width, dtype=torch.long)
    mask = torch.zeros_like(padded)
    for row, prompt in enumerate(prompts):
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
        prompt + _cut(answer, ends) for prompt, answer in zip(prompts, generated, strict=True)
    ]
    token_ids = torch.zeros(len(prompts), max(map(len, sequences)), dtype=torch.long)
    for row, sequence in enumerate(sequences):
        token_ids[row, : len(sequence)] = torch.tensor(sequence)
    token_ids = token_ids.to(device)
    return HeldoutBatch(
        token_ids=token_ids,
        features=target.features(token_ids),
        prompt_lengths=torch.tensor([len(prompt) for prompt in prompts], device=device),
        lengths=torch.tensor([len(sequence) for sequence in sequences], device=device),
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
