"""Runs a chain's models over token ids, one sequence at a time."""

import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from polybasic.chain.errors import UserError
from polybasic.chain.formats.manifest import Member, check_plan
from polybasic.chain.formats.plan import Plan, Tree, Window
from polybasic.chain.kernels.executor import Executor
from polybasic.chain.kernels.torch.executor import TorchExecutor
from polybasic.deploy.drafters.head import EagleDrafter
from polybasic.deploy.drafters.interface import Drafter, NoDrafter
from polybasic.deploy.drafters.model import ModelDrafter
from polybasic.deploy.drafters.ngram import NgramDrafter
from polybasic.deploy.graphs.capture import Graphs
from polybasic.deploy.graphs.device_passes import DevicePasses
from polybasic.deploy.graphs.device_stages import (
    DeviceBlockStage,
    DeviceTreeStage,
    NamedStep,
    RoundParts,
)
from polybasic.deploy.graphs.drawing import DeviceSampler, draws_on_device
from polybasic.deploy.rounds.cache import KeyValueCache
from polybasic.deploy.rounds.sampling import Joiner, Sampling, make_sampler
from polybasic.deploy.rounds.stages import BlockStage, Stage, TreeStage
from polybasic.deploy.rounds.verifier import SPARE_ROWS, Verifier

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
        stopped_by: "stop" (a stop token was drawn), "stop_string" or "length".
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
    """The loaded members of a chain.

    Attributes:
        decoders: verifying members by name, the target first.
        drafters: heads and independent draft models, by name.
        members: all of them as the manifest names them.
        context_tokens: prompt and answer together.
    """

    decoders: dict[str, Executor]
    drafters: dict[str, Executor]
    members: tuple[Member, ...]
    context_tokens: int = CONTEXT_TOKENS_BY_DEFAULT

    @property
    def target(self) -> Executor:
        return next(iter(self.decoders.values()))


@dataclass
class Request:
    """One sequence to continue.

    Attributes:
        token_ids: the prompt, at least one token.
        plan: which members run and how.
        cut: called with each batch of new tokens; returns how many of them to keep if the answer
            ends among them, else None.
    """

    token_ids: list[int]
    max_new_tokens: int
    sampling: Sampling
    stop_tokens: Collection[int]
    plan: Plan
    cut: Callable[[list[int]], int | None] | None = None
    statistics: Statistics | None = field(default=None)


class Engine:
    """Caches and stages over a chain's models. Knows token ids, not text.

    Caches are allocated once: an intermediate whose layers have the shapes of the model right
    above it shares that model's.

    Args:
        models: the loaded members.
        share_caches: False gives every verifying member a cache of its own.
        graphs: capture CUDA graphs of passes and rounds where the members run on a GPU.
    """

    def __init__(self, models: Models, share_caches: bool = True, graphs: bool = True) -> None:
        self.models = models
        self.graphs = Graphs(models.target.device, graphs)
        self.context_tokens = models.context_tokens
        capacity = self.context_tokens + SPARE_ROWS
        self.verifiers: dict[str, Verifier] = {}
        for name, decoder in models.decoders.items():
            above = next(reversed(self.verifiers.values()), None) if share_caches else None
            if above is not None and above.decoder.config.cache_shape == decoder.config.cache_shape:
                cache = above.cache
            else:
                cache = KeyValueCache(
                    decoder.config,
                    decoder.config.num_layers,
                    capacity,
                    decoder.dtype,
                    decoder.device,
                )
            passes = None
            if isinstance(decoder, TorchExecutor) and decoder.runs_on_device:
                passes = DevicePasses(name, decoder, cache, self.graphs)
            self.verifiers[name] = Verifier(name, decoder, cache, passes)
        _hand_out_feature_layers(models, self.verifiers)
        self.drafters = Drafters(models, capacity)
        self._running = threading.Lock()
        self._parts: RoundParts | None = None
        if all(verifier.passes is not None for verifier in self.verifiers.values()):
            self._parts = RoundParts(self.graphs, models.target.device)

    def run(self, request: Request) -> Iterator[list[int]]:
        """Yield new tokens as they are gained; `request.statistics` is set at the end.

        The caches hold one text: from its first tokens on, a request that has not ended and is not
        closed keeps others out.

        Raises:
            UserError: an empty prompt, one that does not fit the context with its new tokens, a
                token id outside of the vocabulary, a plan that these members cannot run, or
                another request that is running.
        """
        self._check(request)
        if not self._running.acquire(blocking=False):
            raise UserError(
                "another answer is being generated",
                "this chain, whose caches hold one text at a time",
                "finish or close the first stream, or load the chain once more",
            )
        try:
            yield from self._generate(request)
        finally:
            # also where a stream is closed or forgotten half-way
            self._running.release()

    def stages(
        self,
        request: Request,
        tree_stage: Callable[..., Stage] | None = None,
        block_stage: Callable[..., Stage] | None = None,
    ) -> tuple[list[Stage], Drafter]:
        """The stages of a request, from the root down, and the drafter below them.

        Rounds stay on the device where all verifying members have passes there, and the request's
        sampling asks for nothing that the host has to count.

        Args:
            tree_stage: makes the innermost stage, from its class and the arguments of that.
            block_stage: makes each stage above in the same way.
        """
        plan, stop = request.plan, request.stop_tokens
        names = [name for name in plan.members if name in self.verifiers]
        for name in names:
            self.verifiers[name].window = plan.windows.get(name)
        drafter = self.drafters.of(plan)
        make_tree, make_block = tree_stage or _made, block_stage or _made
        kinds: tuple[Callable[..., Stage], Callable[..., Stage]] = (TreeStage, BlockStage)
        sampler: Joiner
        parts: tuple[RoundParts, ...] = ()
        if self._parts is not None and draws_on_device(request.sampling):
            kinds, parts = (DeviceTreeStage, DeviceBlockStage), (self._parts,)
            sampler = self._device_sampler(self._parts, request)
        else:
            device, num_prompt_tokens = self.models.target.device, len(request.token_ids)
            sampler = make_sampler(request.sampling, device, num_prompt_tokens)
        of_tree, of_block = kinds
        verifier = self.verifiers[names[-1]]
        stages = [make_tree(of_tree, verifier, drafter, sampler, stop, *parts)]
        for name in reversed(names[:-1]):
            verifier, flush = self.verifiers[name], plan.flush[name]
            stages.insert(
                0, make_block(of_block, verifier, stages[0], sampler, flush, stop, *parts)
            )
        return stages, drafter

    def capture(
        self, plan: Plan, sampling: Sampling, stop: Collection[int], say: Callable[[str], None]
    ) -> None:
        """Capture the graphs that a plan needs, before the first request.

        Args:
            sampling: of the coming requests; others capture what they need when they run.
            say: called with each line of progress.
        """
        if not self.graphs.is_active:
            return
        stages, _ = self.stages(Request([0], 1, sampling, stop, plan))
        steps: list[NamedStep] = []
        max_tokens = 0
        for stage in reversed(stages):
            if isinstance(stage, DeviceTreeStage):
                steps += stage.steps_to_capture()
                max_tokens = stage.max_tokens
            elif isinstance(stage, DeviceBlockStage):
                max_tokens += stage.flush.length
                steps += stage.steps_to_capture(max_tokens)
        self.graphs.prepare(steps, say)

    def _generate(self, request: Request) -> Iterator[list[int]]:
        begin = time.perf_counter()
        stages, drafter = self.stages(request)
        root = stages[0]
        with torch.inference_mode():
            root.prefill(request.token_ids)
        clocks = {stage.verifier.name: stage.verifier.clock for stage in stages}
        if drafter.clock is not None:
            clocks[request.plan.members[-1]] = drafter.clock
        for clock in clocks.values():
            clock.reset()
        prefill_seconds = time.perf_counter() - begin
        num_tokens, stopped_by = 0, "length"
        while num_tokens < request.max_new_tokens:
            with torch.inference_mode():
                block = root.propose(1, request.max_new_tokens - num_tokens)
            new_tokens = block.tokens
            kept = request.cut(new_tokens) if request.cut is not None else None
            if kept is not None:
                new_tokens, stopped_by = new_tokens[:kept], "stop_string"
            elif new_tokens[-1] in request.stop_tokens:
                stopped_by = "stop"
            num_tokens += len(new_tokens)
            seconds = time.perf_counter() - begin
            yield new_tokens
            if stopped_by != "length":
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

    def _device_sampler(self, parts: RoundParts, request: Request) -> DeviceSampler:
        reports_confidence = any(flush.adaptive for flush in request.plan.flush.values())
        drawing = parts.drawing(request.sampling, reports_confidence)
        return DeviceSampler(request.sampling, drawing)

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
        try:
            check_plan(request.plan, self.models.members)
        except ValueError as error:
            raise UserError(
                "plan cannot run", str(error), f"members: {_names(self.models.members)}"
            ) from error


def _made(kind: Callable[..., Stage], *arguments: Any) -> Stage:
    return kind(*arguments)


class Drafters:
    """Drafters over a chain's draft models, each made once."""

    def __init__(self, models: Models, capacity: int) -> None:
        self.models, self.capacity = models, capacity
        self._made: dict[str, EagleDrafter | ModelDrafter] = {}

    def of(self, plan: Plan) -> Drafter:
        """The plan's drafter."""
        drafter: Drafter | None = None
        if plan.members[-1] in self.models.drafters:
            name = plan.members[-1]
            drafter = self.named(name, plan.tree, plan.windows.get(name))
        if plan.ngram is not None:
            return NgramDrafter(plan.ngram, plan.tree, fallback=drafter)
        return drafter or NoDrafter()

    def named(
        self, name: str, tree: Tree, window: Window | None = None
    ) -> EagleDrafter | ModelDrafter:
        """The drafter over the draft model of this name, with such trees and such a window."""
        if name not in self._made:
            model = self.models.drafters[name]
            if model.weights.is_head:
                self._made[name] = EagleDrafter(model, tree, self.capacity)
            else:
                self._made[name] = ModelDrafter(model, tree, self.capacity)
        self._made[name].tree, self._made[name].window = tree, window
        return self._made[name]


def _hand_out_feature_layers(models: Models, verifiers: dict[str, Verifier]) -> None:
    """Let the verifying members' states hold what EAGLE-3 heads read.

    Of members that share a cache, one hands its states to the heads of another.
    """
    for member in models.members:
        head = models.drafters.get(member.name)
        if head is None or not head.weights.feature_layers:
            continue
        feature_layers = head.weights.feature_layers
        caches = [verifiers[name].cache for name in member.drafts_for]
        for verifier in verifiers.values():
            if not any(verifier.cache is cache for cache in caches):
                continue
            if verifier.feature_layers not in ((), feature_layers):
                raise UserError(
                    "heads of one model read different layers",
                    f"{feature_layers} by {member.name}, {verifier.feature_layers} "
                    f"by another head of {verifier.name} or of a model with the same cache",
                    "package a chain with one of these heads",
                )
            verifier.feature_layers = feature_layers


def _names(members: tuple[Member, ...]) -> str:
    return ", ".join(member.name for member in members)
