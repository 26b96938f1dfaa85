"""Runs a chain's models over token ids, one sequence at a time."""

import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

import torch

from polybasic.chain.decoder import Decoder
from polybasic.chain.eagle import EagleHead
from polybasic.chain.errors import UserError
from polybasic.chain.manifest import Plan
from polybasic.deploy.cache import KeyValueCache
from polybasic.deploy.drafter import Drafter, EagleDrafter, NoDrafter, draft_rows
from polybasic.deploy.sampling import Sampling, make_sampler
from polybasic.deploy.stages import BlockStage, Stage, TreeStage
from polybasic.deploy.verifier import PassClock, Verifier

CONTEXT_TOKENS_BY_DEFAULT = 8192


@dataclass(frozen=True)
class Statistics:
    """What a generation cost.

    Attributes:
        num_prompt_tokens: read by the prefill.
        num_tokens: new tokens, a stop token included.
        seconds: prefill included.
        prefill_seconds: of these, until the first round began.
        forward_passes: of each member, by name, without the prefill.
        seconds_by_member: of their passes, without the prefill.
        accepted_lengths: of each verifying member, tokens gained by each of its passes.
        stopped_by: "stop" (a stop token was drawn) or "length".
    """

    num_prompt_tokens: int
    num_tokens: int
    seconds: float
    prefill_seconds: float
    forward_passes: dict[str, int]
    seconds_by_member: dict[str, float]
    accepted_lengths: dict[str, list[int]]
    stopped_by: str

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def mean_accepted_length(self) -> float:
        """New tokens for each forward pass of the target."""
        return self.num_tokens / next(iter(self.forward_passes.values()))


@dataclass
class Models:
    """The loaded members of a chain, from the target down.

    Attributes:
        decoders: target first, then intermediates, by name.
        head: the draft head and its name, if the chain has one.
    """

    decoders: dict[str, Decoder]
    head: tuple[str, EagleHead] | None = None
    context_tokens: int = CONTEXT_TOKENS_BY_DEFAULT

    @property
    def target(self) -> Decoder:
        return next(iter(self.decoders.values()))


@dataclass
class Request:
    """One sequence to continue.

    Attributes:
        token_ids: the prompt, at least one token.
        members: names of the members that run, from the target down; alone, it runs itself.
    """

    token_ids: list[int]
    max_new_tokens: int
    sampling: Sampling
    stop_tokens: Collection[int]
    members: tuple[str, ...]
    statistics: Statistics | None = field(default=None)


class Engine:
    """Caches and stages over a chain's models. Knows token ids, not text.

    Caches are allocated once: the target's is shared by every intermediate whose layers have the
    same shapes.

    Args:
        models: the loaded members.
        plan: tree, flush length and rule.
    """

    def __init__(self, models: Models, plan: Plan) -> None:
        self.models, self.plan = models, plan
        self.context_tokens = models.context_tokens
        # A tree's rows lie behind the last token that fits the context.
        capacity = self.context_tokens + plan.tree.rows
        self.verifiers: dict[str, Verifier] = {}
        for name, decoder in models.decoders.items():
            cache = self._shared_cache(decoder) or KeyValueCache(
                decoder.config, decoder.config.num_layers, capacity, decoder.dtype, decoder.device
            )
            self.verifiers[name] = Verifier(name, decoder, cache)
        self.drafter: EagleDrafter | None = None
        if models.head is not None:
            capacity = self.context_tokens + draft_rows(plan.tree)
            lm_head = models.target.lm_head
            self.drafter = EagleDrafter(models.head[1], lm_head, plan.tree, capacity)

    def run(self, request: Request) -> Iterator[list[int]]:
        """Yield new tokens as they are gained; `request.statistics` is set at the end.

        Raises:
            UserError: an empty prompt, one that does not fit the context with its new tokens, a
                token id outside of the vocabulary, or members that are not a chain.
        """
        self._check(request)
        begin = time.perf_counter()
        root, stages = self._stages(request)
        with torch.inference_mode():
            root.prefill(request.token_ids)
        clocks = self._clocks(request.members)
        for clock in clocks.values():
            clock.reset()
        prefill_seconds = time.perf_counter() - begin
        num_tokens, stopped_by = 0, "length"
        while num_tokens < request.max_new_tokens:
            with torch.inference_mode():
                block = root.propose(1, request.max_new_tokens - num_tokens)
            num_tokens += len(block.tokens)
            has_stopped = block.tokens[-1] in request.stop_tokens
            seconds = time.perf_counter() - begin
            yield block.tokens
            if has_stopped:
                stopped_by = "stop"
                break
        request.statistics = Statistics(
            num_prompt_tokens=len(request.token_ids),
            num_tokens=num_tokens,
            seconds=seconds,
            prefill_seconds=prefill_seconds,
            forward_passes={name: clock.num_passes for name, clock in clocks.items()},
            seconds_by_member={name: clock.seconds for name, clock in clocks.items()},
            accepted_lengths={stage.verifier.name: stage.accepted_lengths for stage in stages},
            stopped_by=stopped_by,
        )

    def _shared_cache(self, decoder: Decoder) -> KeyValueCache | None:
        for other in self.verifiers.values():
            if other.decoder.cache_shape == decoder.cache_shape:
                return other.cache
        return None

    def _stages(self, request: Request) -> tuple[Stage, list[Stage]]:
        """The root stage, and all stages from it down."""
        names = [name for name in request.members if name in self.verifiers]
        has_drafter = len(names) < len(request.members)
        drafter: Drafter = self.drafter if has_drafter and self.drafter else NoDrafter()
        sampler = make_sampler(request.sampling, self.models.target.device)
        stop = request.stop_tokens
        stage: Stage = TreeStage(self.verifiers[names[-1]], drafter, sampler, stop)
        stages = [stage]
        for name in reversed(names[:-1]):
            plan = self.plan
            stage = BlockStage(
                self.verifiers[name], stage, sampler, plan.flush_length, plan.rule, stop
            )
            stages.insert(0, stage)
        return stage, stages

    def _clocks(self, members: tuple[str, ...]) -> dict[str, PassClock]:
        clocks = {name: verifier.clock for name, verifier in self.verifiers.items()}
        if self.drafter is not None and self.models.head is not None:
            clocks[self.models.head[0]] = self.drafter.clock
        return {name: clocks[name] for name in members}

    def _check(self, request: Request) -> None:
        token_ids, vocab_size = request.token_ids, self.models.target.config.vocab_size
        if not token_ids:
            raise UserError("empty prompt", "0 tokens", "give at least one token")
        if request.max_new_tokens < 1:
            raise UserError(
                "nothing to generate", f"max_new_tokens={request.max_new_tokens}", "use 1 or more"
            )
        outside = [token for token in token_ids if not 0 <= token < vocab_size]
        if outside:
            raise UserError(
                "token outside of the vocabulary",
                f"id {outside[0]} of {vocab_size}",
                "encode the prompt with the chain's tokenizer",
            )
        total = len(token_ids) + request.max_new_tokens
        if total > self.context_tokens:
            raise UserError(
                "prompt does not fit the context",
                f"{len(token_ids)} prompt tokens and {request.max_new_tokens} new ones in a "
                f"context of {self.context_tokens}",
                "shorten the prompt or ask for fewer new tokens",
            )
        known = [*self.verifiers, *([self.models.head[0]] if self.models.head else [])]
        in_order = [name for name in known if name in request.members]
        if list(request.members) != in_order or in_order[:1] != known[:1]:
            raise UserError(
                "members are not a chain",
                ", ".join(request.members) or "none",
                f"name some of {', '.join(known)}, in this order, the target first",
            )
