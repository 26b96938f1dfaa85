"""Runs a chain's models over token ids, one sequence at a time."""

import threading
import time
from collections.abc import Callable, Collection, Generator, Iterator
from dataclasses import dataclass, field, replace

import torch

from polybasic.chain.errors import UserError
from polybasic.chain.formats.plan import Plan, Tree, Window
from polybasic.chain.kernels.executor import Executor
from polybasic.chain.kernels.torch.executor import TorchExecutor
from polybasic.chain.readable import readable_value
from polybasic.deploy.drafters.expansion import ExpandingDrafter, MakeDrafter
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
from polybasic.deploy.request import Answer, Request, Statistics
from polybasic.deploy.rounds.cache import KeyValueCache
from polybasic.deploy.rounds.finite import not_finite
from polybasic.deploy.rounds.noise import Noise
from polybasic.deploy.rounds.sampling import (
    CoupledSampler,
    GreedySampler,
    Joiner,
    NotFiniteError,
    Sampling,
    make_sampler,
)
from polybasic.deploy.rounds.stages import (
    BaseBlockStage,
    BaseTreeStage,
    BlockStage,
    Stage,
    TreeStage,
)
from polybasic.deploy.rounds.stopping import StoppedBy, cut_at_end
from polybasic.deploy.rounds.verifier import SPARE_ROWS, Verifier

CONTEXT_TOKENS_BY_DEFAULT = 8192


@dataclass
class Models:
    """The loaded members of a chain.

    Attributes:
        decoders: verifying members by name, the target first.
        drafters: heads and independent draft models, by name.
        drafts_for: by drafter, the verifying members that it can draft for.
        context_tokens: prompt and answer together.
        makers: by drafter, what makes it; those that are not named are made for a head of EAGLE's
            or for an independent model.
    """

    decoders: dict[str, Executor]
    drafters: dict[str, Executor] = field(default_factory=dict)
    drafts_for: dict[str, tuple[str, ...]] = field(default_factory=dict)
    context_tokens: int = CONTEXT_TOKENS_BY_DEFAULT
    makers: dict[str, MakeDrafter] = field(default_factory=dict)

    @property
    def target(self) -> Executor:
        return next(iter(self.decoders.values()))

    def drafters_of(self, name: str) -> list[str]:
        """The drafters that can draft for a verifying member."""
        return [drafter for drafter, names in self.drafts_for.items() if name in names]


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
        caches: dict[str, KeyValueCache] = {}
        above: Executor | None = None
        for name, decoder in models.decoders.items():
            fits = above is not None and above.config.cache_shape == decoder.config.cache_shape
            is_shared = share_caches and fits
            caches[name] = (
                next(reversed(caches.values()))
                if is_shared
                else KeyValueCache.of(decoder, capacity)
            )
            above = decoder
        feature_layers = _feature_layers(models, caches)
        self.verifiers: dict[str, Verifier] = {}
        for name, decoder in models.decoders.items():
            passes = None
            if isinstance(decoder, TorchExecutor) and decoder.runs_on_device:
                passes = DevicePasses(name, decoder, caches[name], self.graphs)
            layers = feature_layers.get(name, ())
            verifier = Verifier(name, decoder, caches[name], passes, feature_layers=layers)
            self.verifiers[name] = verifier
        self.drafters = Drafters(models, capacity)
        self._running = threading.Lock()
        self._parts: RoundParts | None = None
        if all(verifier.passes is not None for verifier in self.verifiers.values()):
            self._parts = RoundParts(self.graphs, models.target.device)

    def run(self, request: Request) -> Answer[list[int]]:
        """The answer's new tokens as they are gained.

        The caches hold one text: from its first tokens on, an answer that has not ended and is not
        closed keeps others out.

        Args:
            request: its plan is one that these members can run.

        Raises:
            UserError: an empty prompt, one that does not fit the context with its new tokens, or a
                token id outside of the vocabulary; with the first tokens, another answer that is
                being generated; with any tokens, a model that computes NaN.
        """
        self._check(request)
        return Answer(self._run_alone(replace(request, sampling=request.sampling.seeded())))

    def stages(
        self, request: Request, make: Callable[..., Stage] = lambda kind, *given: kind(*given)
    ) -> tuple[list[Stage], Drafter]:
        """The stages of a request, from the root down, and the drafter below them.

        Rounds stay on the device where all verifying members have passes there, and the request's
        sampling asks for nothing that the host has to count.

        Args:
            make: makes a stage, from its class and the arguments of that.
        """
        plan, stop = request.plan, request.stop_tokens
        names = [name for name in plan.members if name in self.verifiers]
        verifiers = {
            name: self.verifiers[name].seeing(plan.windows.get(name), self._features(name, plan))
            for name in names
        }
        noise = self.noise(request)
        drafter = self.drafters.of(plan, noise)
        of_tree: type[BaseTreeStage] = TreeStage
        of_block: type[BaseBlockStage] = BlockStage
        sampler: Joiner
        parts: tuple[RoundParts, ...] = ()
        if self._parts is not None and draws_on_device(request.sampling):
            of_tree, of_block, parts = DeviceTreeStage, DeviceBlockStage, (self._parts,)
            sampler = self._device_sampler(self._parts, request, noise)
        else:
            device, num_prompt_tokens = self.models.target.device, len(request.token_ids)
            sampler = make_sampler(request.sampling, device, num_prompt_tokens, plan.rule, noise)
        stages = [make(of_tree, verifiers[names[-1]], drafter, sampler, stop, *parts)]
        for name in reversed(names[:-1]):
            given = verifiers[name], stages[0], sampler, plan.flush[name], stop
            stages.insert(0, make(of_block, *given, *parts))
        return stages, drafter

    def noise(self, request: Request) -> Noise | None:
        """The noise that all members draw with; None where they draw without."""
        if request.sampling.is_greedy or request.plan.rule != "coupled":
            return None
        return Noise(self.models.target, request.sampling.seeded())

    def repeatable_sampler(self, prompt: list[int], sampling: Sampling) -> GreedySampler:
        """Draws as every plan does under these settings: greedily or with the seed's noise."""
        if sampling.is_greedy:
            return GreedySampler(sampling, len(prompt))
        return CoupledSampler(sampling, len(prompt), Noise(self.models.target, sampling))

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

    def _run_alone(self, request: Request) -> Generator[list[int], None, Statistics]:
        if not self._running.acquire(blocking=False):
            raise UserError(
                "another answer is being generated",
                "this chain, whose caches hold one text at a time",
                "finish or close the first stream, or load the chain once more",
            )
        try:
            return (yield from self._generate(request))
        finally:
            # also where an answer is closed or forgotten half-way
            self._running.release()

    def _generate(self, request: Request) -> Generator[list[int], None, Statistics]:
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
        num_tokens = 0
        for new_tokens, ended_by in self._rounds(stages, request):
            num_tokens += len(new_tokens)
            seconds, stopped_by = time.perf_counter() - begin, ended_by
            yield new_tokens
        assert stopped_by is not None
        return Statistics(
            num_prompt_tokens=len(request.token_ids),
            num_tokens=num_tokens,
            seconds=seconds,
            prefill_seconds=prefill_seconds,
            forward_passes={name: clock.num_passes for name, clock in clocks.items()},
            seconds_by_member={name: clock.seconds for name, clock in clocks.items()},
            accepted_lengths={stage.verifier.name: stage.accepted_lengths for stage in stages},
            stopped_by=stopped_by,
            seed=None if request.sampling.is_greedy else request.sampling.seed,
        )

    def _rounds(
        self, stages: list[Stage], request: Request
    ) -> Iterator[tuple[list[int], StoppedBy | None]]:
        try:
            yield from rounds_of(stages[0], request)
        except NotFiniteError as error:
            verifiers = [stage.verifier for stage in reversed(stages)]
            raise not_finite(verifiers, stages[-1].tokens) from error

    def _features(self, name: str, plan: Plan) -> tuple[int, ...]:
        """Layers that a verifier's states hold for the head that drafts in a plan."""
        head = self.models.drafters.get(plan.members[-1])
        return self.verifiers[name].feature_layers if head and head.weights.feature_layers else ()

    def _device_sampler(
        self, parts: RoundParts, request: Request, noise: Noise | None
    ) -> DeviceSampler:
        plan = request.plan
        reports_confidence = any(flush.adaptive for flush in plan.flush.values())
        drawing = parts.drawing(request.sampling, plan.rule, reports_confidence)
        return DeviceSampler(request.sampling, drawing, noise)

    def _check(self, request: Request) -> None:
        token_ids, vocab_size = request.token_ids, self.models.target.config.vocab_size
        # a number of another type would reach native code as other bytes
        if not isinstance(token_ids, list) or any(type(token) is not int for token in token_ids):
            raise UserError(
                "token ids are no list of integers",
                readable_value(token_ids),
                "give ids as chain.encode returns them",
            )
        if not token_ids:
            raise UserError("empty prompt", "0 tokens", "give at least one token")
        num_tokens = request.max_new_tokens
        if type(num_tokens) is not int or num_tokens < 1:
            raise UserError(
                "nothing to generate",
                f"max_new_tokens={num_tokens!r}",
                "use a whole number, 1 or more",
            )
        outside = [token for token in token_ids if not 0 <= token < vocab_size]
        if outside:
            raise UserError(
                "token outside of the vocabulary",
                f"id {outside[0]} of {vocab_size}",
                "encode the prompt with the chain's tokenizer",
            )
        total = len(token_ids) + num_tokens
        if total > self.context_tokens:
            raise UserError(
                "prompt does not fit the context",
                f"{len(token_ids)} prompt tokens and {num_tokens} new ones in a "
                f"context of {self.context_tokens}",
                "shorten the prompt or ask for fewer new tokens",
            )


def rounds_of(root: Stage, request: Request) -> Iterator[tuple[list[int], StoppedBy | None]]:
    """The new tokens of each of a request's rounds after the prefill, and what ended the answer
    with them; None before its last round."""
    num_left, stopped_by = request.max_new_tokens, None
    while stopped_by is None:
        with torch.inference_mode():
            tokens = root.propose(1, num_left).tokens
        tokens, stopped_by = cut_at_end(tokens, num_left, request.stop_tokens, request.text)
        num_left -= len(tokens)
        yield tokens, stopped_by


class Drafters:
    """Drafters over a chain's draft models, whose caches are allocated once."""

    def __init__(self, models: Models, capacity: int) -> None:
        self.models, self.capacity = models, capacity
        self._made: dict[str, ExpandingDrafter] = {}

    def of(self, plan: Plan, noise: Noise | None = None) -> Drafter:
        """The drafter of a request that runs by this plan, and draws with this noise."""
        drafter: Drafter | None = None
        if plan.members[-1] in self.models.drafters:
            name = plan.members[-1]
            drafter = self.named(name, plan.tree, plan.windows.get(name), noise)
        if plan.ngram is not None:
            return NgramDrafter(plan.ngram, plan.tree, fallback=drafter)
        return drafter or NoDrafter()

    def named(
        self, name: str, tree: Tree, window: Window | None = None, noise: Noise | None = None
    ) -> ExpandingDrafter:
        """A drafter over the draft model of this name, with such trees and such a window."""
        if name not in self._made:
            model = self.models.drafters[name]
            make = EagleDrafter if model.weights.is_head else ModelDrafter
            self._made[name] = self.models.makers.get(name, make)(model, tree, self.capacity)
        return self._made[name].drafting(tree, window, noise)


def _feature_layers(models: Models, caches: dict[str, KeyValueCache]) -> dict[str, tuple[int, ...]]:
    """By verifying member: the layers that EAGLE-3 heads read.

    Of members that share a cache, one hands its states to the heads of another.
    """
    found: dict[str, tuple[int, ...]] = {}
    for drafter, head in models.drafters.items():
        layers = head.weights.feature_layers
        verified = [caches[name] for name in models.drafts_for[drafter]]
        for name, cache in caches.items():
            if not layers or not any(cache is one for one in verified):
                continue
            if found.setdefault(name, layers) != layers:
                raise UserError(
                    "heads of one model read different layers",
                    f"{layers} by {drafter}, {found[name]} by another head of {name} or of a "
                    "model with the same cache",
                    "package a chain with one of these heads",
                )
    return found
