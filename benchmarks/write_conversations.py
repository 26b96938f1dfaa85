"""Conversations that a small chat model has with itself, thousands at a time on one GPU.

    python benchmarks/write_conversations.py TARGET --num 40000 --out FILE [--minutes 5]

What `data.self_prompted` and `data.regenerate` do through the runtime, for models so small that
thousands of answers share a pass: those of Llama's architecture. The shipped head of SmolLM2-135M
was trained on what it wrote. Half of the questions go on from an opened user's turn (Magpie, Xu et
al. 2024, arXiv 2406.08464), the others from the first words of a question that comes with polybasic
and is not held out; they are drawn at temperature 0.8 and top-p 0.95. Answers are greedy. A fifth
of the conversations get a second question. The file begins with the conversations that come with
polybasic, as they are, so that the same ones are held out.

#   B = conversations of a pass, T = tokens of each
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from command import positive, run
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from polybasic.chain.formats.files import whole_file
from polybasic.chain.formats.tokenizer import load_tokenizer
from polybasic.train.answers.self_prompting import MOST_TOKENS, TOP_P, reason_against
from polybasic.train.data.chat import encode_prompt, user_turn
from polybasic.train.data.shipped import heldout_shipped, shipped_rows
from polybasic.train.settings import SELF_PROMPTED

MAX_PROMPT_TOKENS, MAX_ANSWER_TOKENS = 384, 256
TEMPERATURE = 0.8
OPENED_BY_WORDS, WORDS = 0.5, (2, 5)
"""Share of questions that begin with so many words of another one."""
SECOND_QUESTIONS = 0.2
BEGINNING_WORDS = 12
"""Of two questions with the same ones the second is left out."""
READ_AT_ONCE = 256
"""Prompts of a pass."""
BISECTIONS = 14
"""That find the least probability which top-p keeps."""
STILL_RUN = 0.75
"""Share of the sequences of a pass below which those that have ended leave it."""
STEPS = 8
"""After which it is seen which have ended."""
COLUMNS = 64
"""Tokens of a sequence are a multiple of it."""
SENDERS = {"user": "human", "assistant": "gpt"}

Messages = list[dict[str, str]]


class Text(NamedTuple):
    """What follows a prompt, without the token that ended it."""

    token_ids: list[int]
    has_ended: bool


class _Going(NamedTuple):
    """What a step reads and writes in place, W columns wide."""

    rows: Tensor
    """Tokens [B, W]."""
    pads: Tensor
    """Columns before each prompt [B]."""
    cache: list[Tensor]
    """Keys and values of each layer [2, B, heads, W, size]."""
    states: Tensor
    """The last ones [B, D]."""
    column: Tensor
    """The next one [1]."""

    def without(self, leaves: Tensor) -> "_Going":
        """The sequences that do not leave."""
        stay = ~leaves
        cache = [layer[:, stay] for layer in self.cache]
        return _Going(self.rows[stay], self.pads[stay], cache, self.states[stay], self.column)


class AnswerBatch:
    """Continuations of many prompts, which end in the same column."""

    def __init__(self, model: Any, stop_tokens: Iterable[int], seed: int) -> None:
        self._model, self._device = model.model, model.device
        self._head, config = model.lm_head, model.config
        self._heads, self._kv_heads = config.num_attention_heads, config.num_key_value_heads
        self._size = config.head_dim
        self._stops = torch.tensor(sorted(stop_tokens), device=self._device)
        torch.manual_seed(seed)

    @torch.inference_mode()
    def continued(self, prompts: Sequence[list[int]], num: int, sampled: bool) -> list[Text]:
        """Up to `num` tokens after each prompt: the most probable ones, or sampled ones."""
        width, device = max(map(len, prompts)), self._device
        end = -(-(width + num) // COLUMNS) * COLUMNS
        rows = torch.zeros(len(prompts), end, dtype=torch.long, device=device)
        rows[:, :width] = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        pads = torch.tensor([width - len(prompt) for prompt in prompts], device=device)
        shape = 2, len(prompts), self._kv_heads, end, self._size
        layers = self._model.layers
        cache = [torch.zeros(shape, dtype=self._model.dtype, device=device) for _ in layers]
        columns = torch.arange(width, device=device)
        states = torch.cat(
            [
                self._pass(
                    rows[part, :width], pads[part], [layer[:, part] for layer in cache], columns
                )
                for part in _parts(len(prompts), READ_AT_ONCE)
            ]
        )
        found = [Text([], has_ended=False)] * len(prompts)
        places = torch.arange(len(prompts), device=device)
        going = _Going(rows, pads, cache, states, columns[-1:] + 1)
        step = self._captured(going, sampled)
        for done in range(1, num + 1):
            step()
            if done % STEPS and done < num:
                continue
            written = going.rows[:, width : width + done]
            is_stop = (written[:, :, None] == self._stops).any(-1)
            has_ended = is_stop.any(1)
            leaves = has_ended | (done == num)
            if done < num and leaves.float().mean() <= 1 - STILL_RUN:
                continue
            lengths = torch.where(has_ended, is_stop.int().argmax(1), done)
            for place, ids, length, ends in zip(
                places[leaves].tolist(),
                written[leaves].tolist(),
                lengths[leaves].tolist(),
                has_ended[leaves].tolist(),
                strict=True,
            ):
                found[place] = Text(ids[:length], ends)
            if leaves.all():
                break
            going, places = going.without(leaves), places[~leaves]
            step = self._captured(going, sampled)
        return found

    def _captured(self, going: "_Going", sampled: bool) -> Callable[[], None]:
        """What writes the next column of `going`; on a GPU a graph, from the second one on."""

        def step() -> None:
            tokens = self._drawn(going.states, sampled)
            going.rows.index_copy_(1, going.column, tokens[:, None])
            going.states.copy_(self._pass(tokens[:, None], going.pads, going.cache, going.column))
            going.column.add_(1)

        if self._device.type != "cuda":
            return step
        graph: torch.cuda.CUDAGraph | None = None

        def replayed() -> None:
            nonlocal graph
            if graph is not None:
                graph.replay()
                return
            step()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()

        return replayed

    def _pass(
        self, token_ids: Tensor, pads: Tensor, cache: list[Tensor], columns: Tensor
    ) -> Tensor:
        """The last states [B, D] of a pass over tokens [B, T], which stand in `columns` [T]."""
        model, (num, length) = self._model, token_ids.shape
        end = cache[0].shape[3] if length == 1 else length
        seen_columns = torch.arange(end, device=self._device)
        rows = columns[:, None]
        # padding sees itself, so that no row sees nothing
        seen = (seen_columns <= rows) & (seen_columns >= pads[:, None, None])
        seen = (seen | (seen_columns == rows))[:, None]
        x = model.embed_tokens(token_ids)
        cos, sin = model.rotary_emb(x, (columns - pads[:, None]).clamp(min=0))
        for layer, own in zip(model.layers, cache, strict=True):
            attention, normed = layer.self_attn, layer.input_layernorm(x)
            q, k, v = (
                projection(normed).view(num, length, -1, self._size).transpose(1, 2)
                for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
            )
            q, k = apply_rotary_pos_emb(q, k, cos, sin)
            own[0].index_copy_(2, columns, k)
            own[1].index_copy_(2, columns, v)
            keys, values = own[:, :, :, :end]
            # of a single token, queries that share their keys are rows of one product
            q = q.reshape(num, self._kv_heads, -1, self._size) if length == 1 else q
            out = F.scaled_dot_product_attention(
                q, keys, values, attn_mask=seen, enable_gqa=length > 1
            )
            out = out.reshape(num, self._heads, length, self._size).transpose(1, 2)
            x = x + attention.o_proj(out.reshape(num, length, -1))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return model.norm(x[:, -1])

    def _drawn(self, states: Tensor, sampled: bool) -> Tensor:
        logits = self._head(states)
        if not sampled:
            return logits.argmax(-1)
        found = (logits.float() / TEMPERATURE).softmax(-1)
        low, high = torch.zeros_like(found[:, :1]), found.amax(-1, keepdim=True)
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            is_enough = (found * (found >= middle)).sum(-1, keepdim=True) >= TOP_P
            low, high = torch.where(is_enough, middle, low), torch.where(is_enough, high, middle)
        noise = torch.empty_like(found).exponential_()
        return (found * (found >= low)).div_(noise).argmax(-1)


class ConversationWriter:
    """Writes conversations, `at_once` of them in a pass."""

    def __init__(
        self,
        batch: AnswerBatch,
        tokenizer: PreTrainedTokenizerBase,
        given: Sequence[str],
        at_once: int,
        seed: int,
    ) -> None:
        self._batch, self._tokenizer, self._at_once = batch, tokenizer, at_once
        self._given, self._random = given, random.Random(seed)
        self._seen = set[str]()

    def conversations(self, num: int) -> list[Messages]:
        """Those of `num` questions that are of use, with answers."""
        held = self._answered(self._asked([[] for _ in range(num)]))
        again = int(SECOND_QUESTIONS * len(held))
        longer = self._answered(self._asked(held[:again]))
        begun = {conversation[0]["content"] for conversation in longer}
        return longer + [
            conversation for conversation in held if conversation[0]["content"] not in begun
        ]

    def _asked(self, held: list[Messages]) -> list[Messages]:
        """Conversations with a further question, where it is of use."""
        beginnings = [self._beginning() if not conversation else "" for conversation in held]
        opened = [
            user_turn(self._tokenizer, conversation).token_ids
            + self._tokenizer(beginning, add_special_tokens=False)["input_ids"]
            for conversation, beginning in zip(held, beginnings, strict=True)
        ]
        asked = []
        for place, written, has_ended in self._continued(opened, MOST_TOKENS, sampled=True):
            question = (beginnings[place] + written).strip()
            first = " ".join(question.lower().split()[:BEGINNING_WORDS])
            if has_ended and first not in self._seen and not reason_against(question):
                self._seen.add(first)
                asked.append([*held[place], {"role": "user", "content": question}])
        return asked

    def _answered(self, asked: list[Messages]) -> list[Messages]:
        prompts = [encode_prompt(self._tokenizer, conversation) for conversation in asked]
        return [
            [*asked[place], {"role": "assistant", "content": written}]
            for place, written, _ in self._continued(prompts, MAX_ANSWER_TOKENS, sampled=False)
            if written.strip()
        ]

    def _continued(
        self, prompts: list[list[int]], num_tokens: int, sampled: bool
    ) -> Iterator[tuple[int, str, bool]]:
        """The place of each prompt that is not too long, what follows it, and whether it ended."""
        places = [i for i, prompt in enumerate(prompts) if len(prompt) <= MAX_PROMPT_TOKENS]
        places.sort(key=lambda place: len(prompts[place]))
        for part in _parts(len(places), self._at_once):
            began, own = time.perf_counter(), places[part]
            found = self._batch.continued([prompts[place] for place in own], num_tokens, sampled)
            seconds, num = (
                time.perf_counter() - began,
                sum(len(sequence.token_ids) for sequence in found),
            )
            print(f"{len(own)} texts, {num} tokens, {num / seconds:.0f} tokens/s", file=sys.stderr)
            texts = self._tokenizer.batch_decode([sequence.token_ids for sequence in found])
            for place, text, sequence in zip(own, texts, found, strict=True):
                # half a character stands at the end of an answer that was cut
                yield place, text.rstrip("\ufffd"), sequence.has_ended

    def _beginning(self) -> str:
        """Nothing, or the first words of a question that is given."""
        if self._random.random() >= OPENED_BY_WORDS:
            return ""
        words = self._random.choice(self._given).split()
        return " ".join(words[: self._random.randint(*WORDS)])


def _parts(num: int, size: int) -> Iterator[slice]:
    return (slice(first, first + size) for first in range(0, num, size))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("target", type=Path, help="folder of the model with its tokenizer")
    parser.add_argument("--out", type=Path, required=True, help="conversations, as JSON lines")
    parser.add_argument("--num", type=positive, default=40_000, help="conversations, at least")
    parser.add_argument("--minutes", type=float, default=60, help="after which no more are begun")
    parser.add_argument("--at-once", type=positive, default=4096)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = AutoModelForCausalLM.from_pretrained(arguments.target, dtype=torch.bfloat16)
    tokenizer = load_tokenizer(arguments.target, "target's tokenizer")
    stops = {tokenizer.eos_token_id, *tokenizer.all_special_ids}
    shipped, heldout = shipped_rows(), {row["id"] for row in heldout_shipped()}
    given = [
        turn["value"]
        for row in shipped
        if row["id"] not in heldout
        for turn in row["conversations"]
        if turn["from"] == "human"
    ]
    batch = AnswerBatch(model.to(device).eval(), stops, arguments.seed)
    writer = ConversationWriter(batch, tokenizer, given, arguments.at_once, arguments.seed)
    written: list[Messages] = []
    over = time.perf_counter() + 60 * arguments.minutes
    try:
        while len(written) < arguments.num and time.perf_counter() < over:
            written += writer.conversations(arguments.at_once)
    except KeyboardInterrupt:
        print("stopped; what was written so far is kept", file=sys.stderr)
    with whole_file(arguments.out) as partial, partial.open("w", encoding="utf-8") as lines:
        for row in shipped:
            lines.write(json.dumps(row, ensure_ascii=False) + "\n")
        for place, messages in enumerate(written):
            turns = [
                {"from": SENDERS[message["role"]], "value": message["content"]}
                for message in messages
            ]
            row = {"id": f"{SELF_PROMPTED}-{place}", "task": SELF_PROMPTED, "conversations": turns}
            lines.write(json.dumps(row, ensure_ascii=False) + "\n")
    print(f"wrote {arguments.out}: {len(shipped)} and {len(written)} conversations")


if __name__ == "__main__":
    run(main)
