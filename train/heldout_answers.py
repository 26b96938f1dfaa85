"""How well a model knows conversations that it was not trained on: their loss, and right answers.

An answer is right if greedy decoding after the turns before it would write it token for token, end
of turn included. That is so exactly if each of its tokens is the most probable one after the true
tokens before it, hence one pass over a conversation judges all of its answers.

Shapes: B = conversations of a pass, T = tokens.
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from polybasic.chain.progress import tracked
from polybasic.train.data.chat import EncodedConversation, encode_accepted
from polybasic.train.head.acceptance import NO_TASK

_BATCH = 16


class _Heldout(NamedTuple):
    encoded: EncodedConversation
    task: str


@torch.no_grad()
def measure_answers(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    conversations: Iterable[Mapping[str, Any]],
    max_tokens: int,
) -> dict[str, Any]:
    """Loss and right answers of held-out conversations.

    Args:
        model: a causal language model, in the dtype of its passes or under autocast.
        tokenizer: with a chat template.
        conversations: rows with messages and, where they have one, a task; those that the chat
            template refuses are left out.
        max_tokens: longer ones are cut there; an answer that is cut counts with what is left.

    Returns:
        "heldout_loss" and "heldout_answer_loss", nats a token, of all tokens and of the
        assistant's; shares from 0 to 1: "right_tokens", of the assistant's tokens those that are
        the most probable after the true ones before, and "right_answers", each in all and
        "_by_task"; "num_answers". {} where nothing is answered.
    """
    heldout = []
    for row in conversations:
        encoded, _ = encode_accepted(tokenizer, [row["messages"]], max_tokens)
        heldout += [_Heldout(each, row.get("task") or NO_TASK) for each in encoded]
    heldout.sort(key=lambda each: len(each.encoded.input_ids))
    sums, counts = torch.zeros(2), torch.zeros(2)
    num_right, num_answers = Counter[str](), Counter[str]()
    num_right_tokens, num_tokens = Counter[str](), Counter[str]()
    starts = range(0, len(heldout), _BATCH)
    for start in tracked(starts, "held-out answers"):
        batch = heldout[start : start + _BATCH]
        token_ids, is_token, is_assistant = _padded([each.encoded for each in batch])
        logits = model(input_ids=token_ids, use_cache=False).logits[:, :-1].float()
        losses = F.cross_entropy(logits.mT, token_ids[:, 1:], reduction="none")
        for number, counted in enumerate((is_token, is_assistant)):
            sums[number] += losses[counted].sum()
            counts[number] += counted.sum()
        is_right = logits.argmax(dim=-1) == token_ids[:, 1:]
        for index, (_, task) in enumerate(batch):
            num_right_tokens[task] += int((is_right[index] & is_assistant[index]).sum())
            num_tokens[task] += int(is_assistant[index].sum())
            judged = _judged(is_right[index].tolist(), is_assistant[index].tolist())
            num_right[task] += sum(judged)
            num_answers[task] += len(judged)
    if not num_answers.total():
        return {}
    loss, answer_loss = (sums / counts).tolist()
    return {
        "heldout_loss": round(loss, 4),
        "heldout_answer_loss": round(answer_loss, 4),
        **_shares("right_tokens", num_right_tokens, num_tokens),
        **_shares("right_answers", num_right, num_answers),
        "num_answers": num_answers.total(),
    }


def _shares(name: str, right: Counter[str], judged: Counter[str]) -> dict[str, Any]:
    return {
        name: round(right.total() / judged.total(), 4),
        f"{name}_by_task": {
            task: round(right[task] / num, 4) for task, num in sorted(judged.items()) if num
        },
    }


def _padded(conversations: list[EncodedConversation]) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids [B, T], padded on the right, and of all but the first of a row, [B, T - 1]: whether
    they are tokens of the conversation, and of the assistant's."""
    shape = len(conversations), max(len(each.input_ids) for each in conversations)
    token_ids = torch.zeros(shape, dtype=torch.long)
    is_token, is_assistant = torch.zeros(2, *shape, dtype=torch.bool)
    for row, each in enumerate(conversations):
        length = len(each.input_ids)
        token_ids[row, :length] = torch.tensor(each.input_ids)
        is_assistant[row, :length] = torch.tensor(each.is_assistant)
        is_token[row, :length] = True
    return token_ids, is_token[:, 1:], is_assistant[:, 1:]


def _judged(is_right: list[bool], is_assistant: list[bool]) -> list[bool]:
    """Of each run of the assistant's tokens, whether all are right."""
    runs = itertools.groupby(zip(is_assistant, is_right, strict=True), key=lambda token: token[0])
    return [all(right for _, right in run) for assistant, run in runs if assistant]
