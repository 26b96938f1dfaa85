"""Which tokens a head drafts among: those that the assistant's answers use most.

A smaller output projection makes a draft pass cheaper; a token that is left out is never drafted,
and the verifier gives it as its own.
"""

from collections.abc import Iterator

import torch
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from polybasic.chain.base.errors import UserError
from polybasic.train.data.batches import step_generator
from polybasic.train.data.chat import encode_accepted
from polybasic.train.settings import DataSettings

MAX_CONVERSATIONS = 16_384
"""So many are counted at most: their answers have millions of tokens."""

MULTIPLE = 64
"""Of tokens, for products over the draft vocabulary."""

_AT_ONCE = 256


def choose_draft_vocabulary(
    counts: Tensor, tokenizer: PreTrainedTokenizerBase, size: int | float
) -> Tensor:
    """The most frequent tokens, and the one that ends an answer; ties go to the lower id.

    Args:
        counts: from `count_answer_tokens`.
        tokenizer: of the target.
        size: tokens to choose; or below 1, the share of answers that they are to cover. Then as
            many are chosen as the most frequent ones of one half of the conversations have to be to
            cover that share of the other half, rounded up to a multiple of `MULTIPLE`: tokens that
            answers use and these conversations do not have their share, too.

    Returns:
        int64, ascending.

    Raises:
        UserError: more than the target's vocabulary has.
    """
    counts, halves = counts.sum(dim=0), counts
    if size < 1:
        order = halves[0].argsort(descending=True, stable=True)
        covered = halves[1][order].cumsum(0)
        fewest = int((covered < size * halves[1].sum()).sum()) + 1
        size = min(-(-fewest // MULTIPLE) * MULTIPLE, len(counts))
    size = int(size)
    if size > len(counts):
        raise UserError(
            "draft vocabulary larger than the target's",
            f"train.draft_vocab_size = {size}, the target has {len(counts)} tokens",
            "lower it, or leave it null to draft among all tokens",
        )
    order = counts.clone()
    if tokenizer.eos_token_id is not None:
        order[tokenizer.eos_token_id] = counts.sum() + 1
    return order.argsort(descending=True, stable=True)[:size].sort().values


def coverage(counts: Tensor, draft_token_ids: Tensor) -> float:
    """The share of the counted tokens [2, V] that a head can draft, 0 to 1."""
    return float(counts[:, draft_token_ids].sum() / counts.sum())


def count_answer_tokens(
    conversations: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    vocab_size: int,
    data: DataSettings,
    seed: int,
) -> Tensor:
    """How often the assistant's answers have each token, int64 [2, V]: in every other
    conversation, and in those between. The same in every process.

    Args:
        conversations: as they are trained on; at most `MAX_CONVERSATIONS` drawn from them count.
        tokenizer: of the target.
        vocab_size: V, of the target's embedding.
        data: says where conversations are cut.
        seed: of the draw.

    Raises:
        UserError: the conversations have no token of the assistant's.
    """
    counts = torch.zeros(2, vocab_size, dtype=torch.long)
    answers = _answer_tokens(conversations, tokenizer, data.max_tokens, seed)
    for number, token_ids in enumerate(answers):
        counts[number % 2] += torch.bincount(token_ids, minlength=vocab_size)
    if not counts.any():
        raise UserError(
            "no assistant tokens to choose a draft vocabulary from",
            f"{len(conversations)} conversations cut at data.max_tokens = {data.max_tokens}",
            "raise data.max_tokens, or check that the chat template keeps the answers",
        )
    return counts


def _answer_tokens(
    conversations: Dataset, tokenizer: PreTrainedTokenizerBase, max_tokens: int, seed: int
) -> Iterator[Tensor]:
    generator = step_generator(seed, 0, "draft vocabulary")
    drawn = torch.randperm(len(conversations), generator=generator)[:MAX_CONVERSATIONS].tolist()
    for start in range(0, len(drawn), _AT_ONCE):
        messages = conversations.select(drawn[start : start + _AT_ONCE])["messages"]
        encoded, _ = encode_accepted(tokenizer, messages, max_tokens)  # refusals: BatchStream's
        for each in encoded:
            yield torch.tensor(each.input_ids)[torch.tensor(each.is_assistant, dtype=torch.bool)]
