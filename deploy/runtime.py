"""A chain, loaded: text in, text out, with what it cost."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers.decoders import DecodeStream

from polybasic.chain.checkpoint import resolve_chain
from polybasic.chain.errors import UserError
from polybasic.chain.files import read_json
from polybasic.chain.loading import load_decoder, load_head
from polybasic.chain.manifest import Plan
from polybasic.chain.verify import CheckedChain, check_chain
from polybasic.deploy.drafter import draft_rows
from polybasic.deploy.engine import (
    CONTEXT_TOKENS_BY_DEFAULT,
    Engine,
    Models,
    Request,
    Statistics,
)
from polybasic.deploy.sampling import Sampling

Messages = Sequence[dict[str, str]]


@dataclass(frozen=True)
class Generation:
    """A finished answer.

    Attributes:
        text: without special tokens.
        token_ids: the new tokens, a stop token included.
        statistics: what it cost.
    """

    text: str
    token_ids: list[int]
    statistics: Statistics


@dataclass(frozen=True)
class Piece:
    """A part of an answer while it is made; `text` may be empty in the middle of a character."""

    text: str
    token_ids: list[int]


class Chain:
    """A loaded chain; made by `load_chain`.

    Attributes:
        manifest: the content of chain.json.
        target_folder: where the target's checkpoint lies.
        plan: which members run by default, with tree, flush length and rule.
        last_statistics: of the last finished generation.
    """

    def __init__(
        self, checked: CheckedChain, tokenizer: Any, engine: Engine, stop_tokens: frozenset[int]
    ) -> None:
        self.manifest, self.plan = checked.manifest, engine.plan
        self.target_folder = checked.target
        self.tokenizer, self.engine, self.stop_tokens = tokenizer, engine, stop_tokens
        self.last_statistics: Statistics | None = None

    def generate(
        self,
        prompt: str | Messages,
        *,
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        members: Sequence[str] | None = None,
    ) -> Generation:
        """Answer a prompt, with the target's own distribution whatever members run.

        Args:
            prompt: messages ({"role", "content"}), or a text, which is one user message where
                the tokenizer has a chat template and is continued as it is where it has none.
            temperature: 0 is greedy.
            members: which members run, from the target down; default: the plan's.

        Raises:
            UserError: a setting out of range, or what does not fit the context.
        """
        sampling = Sampling(temperature, top_k, top_p, seed)
        token_ids: list[int] = []
        for new_tokens in self.stream_ids(self.encode(prompt), max_new_tokens, sampling, members):
            token_ids += new_tokens
        assert self.last_statistics is not None
        text = self.tokenizer.decode(token_ids, skip_special_tokens=True)
        return Generation(text, token_ids, self.last_statistics)

    def stream(
        self,
        prompt: str | Messages,
        *,
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        members: Sequence[str] | None = None,
    ) -> Iterator[Piece]:
        """As `generate`, yielding a piece for each pass of the target."""
        sampling = Sampling(temperature, top_k, top_p, seed)
        decode = DecodeStream(skip_special_tokens=True)
        for new_tokens in self.stream_ids(self.encode(prompt), max_new_tokens, sampling, members):
            parts = [decode.step(self.tokenizer.backend_tokenizer, token) for token in new_tokens]
            yield Piece("".join(part for part in parts if part), new_tokens)

    def stream_ids(
        self,
        token_ids: list[int],
        max_new_tokens: int,
        sampling: Sampling,
        members: Sequence[str] | None = None,
    ) -> Iterator[list[int]]:
        """Continue token ids; yields the new ones as the target confirms them."""
        chosen = tuple(members or self.plan.members)
        request = Request(token_ids, max_new_tokens, sampling, self.stop_tokens, chosen)
        yield from self.engine.run(request)
        self.last_statistics = request.statistics

    def encode(self, prompt: str | Messages) -> list[int]:
        """Token ids of a prompt, by the tokenizer's own chat template.

        Raises:
            UserError: messages without a chat template, or that the template refuses.
        """
        if isinstance(prompt, str):
            if self.tokenizer.chat_template is None:
                return list(self.tokenizer(prompt)["input_ids"])
            prompt = [{"role": "user", "content": prompt}]
        if self.tokenizer.chat_template is None:
            raise UserError(
                "no chat template",
                "the chain's tokenizer",
                "give a text, or package a target whose tokenizer has a template",
            )
        # The engine refuses what is too long; transformers would only warn.
        encoded = self.tokenizer.apply_chat_template(
            list(prompt),
            add_generation_prompt=True,
            return_dict=True,
            tokenizer_kwargs={"verbose": False},
        )
        return list(encoded["input_ids"])


def load_chain(
    path: str | Path,
    *,
    device: str | None = None,
    dtype: str | None = None,
    context_tokens: int | None = None,
    plan: Plan | None = None,
    digests: bool = True,
) -> Chain:
    """Check a chain and load it.

    Args:
        path: a folder, or a hub id org/name[@revision].
        device: default: cuda if there is one, else cpu.
        dtype: "bfloat16", "float16" or "float32"; default: as the target is stored.
        context_tokens: prompt and answer together; caches are allocated for this many. Default:
            what the target is declared for, at most 8192.
        plan: run by this one and not by the manifest's.
        digests: compare the sha256 of every file first.

    Raises:
        UserError: whatever `check_chain` finds, or a context longer than the target's.
    """
    checked = check_chain(resolve_chain(str(path)), digests=digests)
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    compute_dtype = _dtype(dtype, checked.target)
    plan = plan or checked.manifest.plan
    models = _load_models(checked, plan, where, compute_dtype, context_tokens)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checked.tokenizer, trust_remote_code=False)
    stop_tokens = read_stop_tokens(checked.target, tokenizer.eos_token_id)
    return Chain(checked, tokenizer, Engine(models, plan), stop_tokens)


def read_stop_tokens(target: Path, eos_token_id: int | None) -> frozenset[int]:
    """End-of-sequence ids: of generation_config.json, or config.json, and the tokenizer's."""
    found: list[int] = [] if eos_token_id is None else [eos_token_id]
    for name in ("generation_config.json", "config.json"):
        path = target / name
        ids = read_json(path, name).get("eos_token_id") if path.is_file() else None
        if ids is not None:
            found += ids if isinstance(ids, list) else [ids]
            break
    return frozenset(found)


def _load_models(
    checked: CheckedChain,
    plan: Plan,
    device: torch.device,
    dtype: torch.dtype,
    context_tokens: int | None,
) -> Models:
    declared = read_json(checked.target / "config.json", "model config")
    longest = declared["max_position_embeddings"]
    context_tokens = context_tokens or min(longest, CONTEXT_TOKENS_BY_DEFAULT)
    if context_tokens > longest:
        raise UserError(
            "context longer than the target's",
            f"context_tokens={context_tokens}",
            f"the target is declared for {longest}",
        )
    num_positions = context_tokens + max(plan.tree.rows, draft_rows(plan.tree))
    *verifying, drafter = checked.manifest.members
    decoders = {
        member.name: load_decoder(checked.members[member.name], dtype, device, num_positions)
        for member in verifying
    }
    target = decoders[verifying[0].name]
    head = load_head(checked.members[drafter.name], target, num_positions)
    return Models(decoders, (drafter.name, head), context_tokens)


def _dtype(name: str | None, target: Path) -> torch.dtype:
    if name is None:
        config = read_json(target / "config.json", "model config")
        name = config.get("dtype") or config.get("torch_dtype") or "float32"
    known = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
    if name not in known:
        raise UserError("unknown dtype", f"dtype={name}", f"use one of {', '.join(known)}")
    return known[name]
