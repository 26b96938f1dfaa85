"""Runs a chain's models over token ids, many sequences at a time."""

import threading
import time
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import torch

from polybasic.chain.base.errors import UserError
from polybasic.chain.base.readable import readable_value
from polybasic.chain.formats.plan import BigLittle, Judge, Plan, Situation
from polybasic.chain.kernels.cuda.graphs import Graphs
from polybasic.chain.kernels.executor import Executor
from polybasic.deploy.runtime.batching import ActiveSequence, choose, rows_of_prompts, usual_stage
from polybasic.deploy.runtime.drafters.interface import Drafter
from polybasic.deploy.runtime.graphs.device_stages import (
    DeviceBlockStage,
    DeviceTreeStage,
    NamedStep,
    RoundParts,
)
from polybasic.deploy.runtime.graphs.drawing import DeviceSampler, draws_on_device
from polybasic.deploy.runtime.models import Models
from polybasic.deploy.runtime.remote.requests import check_remote, remote_stage
from polybasic.deploy.runtime.request import Answer, Piece, Request, Statistics
from polybasic.deploy.runtime.rounds.judging import (
    JudgedBlockStage,
    JudgingSampler,
    RememberingTreeStage,
)
from polybasic.deploy.runtime.rounds.noise import Noise
from polybasic.deploy.runtime.rounds.passes import Passes, VerifierPass, alone, run_together
from polybasic.deploy.runtime.rounds.sampling import (
    CoupledSampler,
    GreedySampler,
    Joiner,
    Sampling,
    make_sampler,
)
from polybasic.deploy.runtime.rounds.stages import (
    BaseBlockStage,
    BaseTreeStage,
    BlockStage,
    Stage,
    TreeStage,
)
from polybasic.deploy.runtime.rounds.stopping import StoppedBy, cut_at_end
from polybasic.deploy.runtime.rounds.tolerance import TolerantBlockStage, TolerantSampler
from polybasic.deploy.runtime.rounds.verifier import Verifier
from polybasic.deploy.runtime.slots import SEQUENCES_BY_DEFAULT, Drafters, Slot, Slots
from polybasic.deploy.runtime.sources import check_source


class Engine:
    """Sequences over a chain's models. Knows token ids, not text.

    Rounds of several sequences whose next pass is of the same model run as one pass. What a
    sequence answers does not depend on the others: with native CPU kernels a row gets the same
    bits in any company; elsewhere products over another number of rows may round differently.
    On a GPU whole rounds are captured in CUDA graphs where there is one sequence at a time; with
    more, passes are.

    All methods may be called from several threads; passes run one after the other.

    Args:
        models: the loaded members.
        share_caches: False gives every verifying member a cache of its own.
        graphs: capture CUDA graphs of passes and rounds where the members run on a GPU.
        sequences: most at a time, each with its own caches, which are allocated when they are
            needed. Default: `SEQUENCES_BY_DEFAULT`, and 1 where the members run on a GPU.
        reuses: leading tokens that were read for an earlier sequence are not read again. Default:
            where that changes no bit of an answer.
        cache_tokens: that the caches of all sequences hold together, at least those of one context:
            what is kept of sequences that are over gives way, then the latest ones pause. On a CPU
            alone, whose caches take memory by need; default: as many as there are sequences for.
        kept_tokens: beyond which nothing is kept of sequences that are over; default: all of these.

    Attributes:
        measured_plan: the plan of requests that follow the situation.
    """

    def __init__(
        self,
        models: Models,
        share_caches: bool = True,
        graphs: bool = True,
        sequences: int | None = None,
        reuses: bool | None = None,
        cache_tokens: int | None = None,
        kept_tokens: int | None = None,
    ) -> None:
        self.models = models
        self.graphs = Graphs(models.device, graphs)
        self.context_tokens = models.context_tokens
        self.measured_plan: Callable[[Situation], Plan] | None = None
        if sequences is None:
            sequences = 1 if models.run_on_device else SEQUENCES_BY_DEFAULT
        captures = models.run_on_device and sequences == 1
        if models.run_on_device:
            for executor in self._executors:
                executor.capture_by(self.graphs)
        if reuses is None:
            reuses = all(decoder.is_batch_invariant for decoder in models.decoders.values())
        self.slots = Slots(
            models,
            sequences,
            share_caches,
            self.graphs if captures else None,
            reuses,
            cache_tokens,
            kept_tokens,
        )
        self._parts = RoundParts(self.graphs, models.device) if captures else None
        self._stepping = threading.Lock()
        self._running: list[ActiveSequence] = []

    @property
    def _executors(self) -> list[Executor]:
        return [*self.models.decoders.values(), *self.models.drafters.values()]

    @property
    def captures_rounds(self) -> bool:
        """Whether rounds stay on the device, where all trees of a plan have as many rows."""
        return self._parts is not None

    @property
    def verifiers(self) -> dict[str, Verifier]:
        """Of the first sequence's caches, by name, the target first."""
        return self._first.verifiers

    @property
    def drafters(self) -> Drafters:
        """Of the first sequence's caches."""
        return self._first.drafters

    def run(self, request: Request) -> Answer[list[int]]:
        """The answer's new tokens as they are gained.

        Args:
            request: its plan is one that these members can run.

        Raises:
            UserError: as `check`; with the first tokens, no room for another sequence; with any
                tokens, a model that computes NaN.
        """
        self.check(request)
        return Answer(self._tokens_of(request))

    def begin(
        self, request: Request, runs_ahead: bool = False, make: Callable[..., Stage] = usual_stage
    ) -> ActiveSequence:
        """Take a sequence for a request, which `check` has passed; `step` runs it.

        Args:
            runs_ahead: it goes on while what it has gained is not taken; else it waits.
            make: as `stages`.

        Raises:
            BusyError: all sequences are used.
            UserError: there is no memory for another one.
        """
        request = replace(request, sampling=request.sampling.seeded())
        with self._stepping:
            self._reap()
            slot = self.slots.take(request.token_ids)
            sequence = ActiveSequence(request, slot, self, runs_ahead, make)
            self._running.append(sequence)
        return sequence

    def pieces_of(self, running: ActiveSequence) -> Generator[Piece, None, Statistics]:
        """The pieces of a request that was begun, made as they are asked for."""
        try:
            while not running.is_over or running.pieces:
                yield from running.take()
                if not running.is_over and not running.pieces:
                    self.step()
            return running.statistics
        finally:
            running.close()

    def step(self) -> bool:
        """Run one pass, for all sequences that wait for it; False if none waits for any."""
        with self._stepping, torch.inference_mode():
            self._reap()
            self._make_room()
            num_reading = len(rows_of_prompts(sequence.waiting for sequence in self._running))
            for pace in self.slots.paces.values():
                pace.num_running, pace.num_reading = self.num_running, num_reading
            chosen = choose([sequence for sequence in self._running if sequence.wants_to_run])
            if not chosen:
                return False
            try:
                results = self._run_together([sequence.waiting for sequence in chosen])
            except BaseException as error:
                for sequence in chosen:
                    sequence.fail(error)
                if not isinstance(error, Exception):
                    raise
                return True
            for sequence, result in zip(chosen, results, strict=True):
                sequence.resume(result)
            return True

    def exchange(self, name: str, head: Executor) -> None:
        """Let a head draft, from the next answer on, in the place of one of its kind and sizes.

        No answer may be under way, and no passes of heads be captured.
        """
        with self._stepping:
            self._reap()
            assert not self._running, f"{len(self._running)} answers draft with {name}"
            assert not self.models.run_on_device, f"passes of {name} are captured"
            self.models.drafters[name] = head
            for slot in self.slots.made:
                slot.drafters.exchange(name)

    def _make_room(self) -> None:
        """Pause sequences while the caches hold more than they may: first those that do not want to
        run, then the latest; and those for the first that wants to start where none runs."""
        started = [each for each in self._running if each.has_started and not each.is_over]
        if not self.slots.make_room():
            started.sort(key=lambda sequence: not sequence.wants_to_run)
            while len(started) > 1 and not self.slots.make_room():
                started.pop().pause()
        wanting = [sequence for sequence in self._running if sequence.wants_to_run]
        if wanting and not any(sequence.has_started for sequence in wanting):
            while started and not wanting[0].has_room:
                started.pop().pause()

    def _run_together(self, waiting: Sequence[Any]) -> list[Any]:
        """The results of passes of one kind, from whose time the pace of prompts is found."""
        began = time.perf_counter()
        results = run_together(waiting)
        if isinstance(waiting[0], VerifierPass):
            num_rows = sum(rows_of_prompts(waiting))
            waiting[0].verifier.pace.took(num_rows, time.perf_counter() - began)
        return results

    @property
    def num_running(self) -> int:
        """Sequences that have not ended."""
        return sum(not sequence.is_over for sequence in self._running)

    def plan_now(self, request: Request, situation: Situation) -> Plan:
        """The plan for a request that follows its situation."""
        assert self.measured_plan is not None, "no plans by load, context or length"
        plan, rule = self.measured_plan(situation), request.plan.rule
        return plan if plan.rule == rule else plan.model_copy(update={"rule": rule})

    @torch.inference_mode()
    def stages(
        self,
        request: Request,
        make: Callable[..., Stage] = usual_stage,
        slot: Slot | None = None,
        noise: Noise | None = None,
    ) -> tuple[list[Stage], Drafter]:
        """The stages of a request, from the root down, and the drafter below them.

        Rounds stay on the device where all verifying members have passes there, and the request
        asks for nothing that the host has to count.

        Args:
            make: makes a stage, from its class and the arguments of that.
            slot: whose caches they read, as they are; default: the first one's, emptied.
            noise: of the request; default: made for it.
        """
        if slot is None:
            slot = self._first
            slot.clear()
        noise = noise or self.noise(request)
        drafter = slot.drafters.of(request.plan, noise, request.kept_drafter, request.history)
        stages = self._stages_here(request, make, slot, noise, drafter)
        if slot.session is not None:
            stages.insert(0, remote_stage(slot.session, request, stages, drafter))
        stages[0].num_logprobs = request.logprobs
        stages[0].num_prompt_logprobs = request.prompt_logprobs
        return stages, drafter

    def _stages_here(
        self,
        request: Request,
        make: Callable[..., Stage],
        slot: Slot,
        noise: Noise | None,
        drafter: Drafter,
    ) -> list[Stage]:
        """The stages of the members that run here, from the top down."""
        plan, stop = request.plan, request.stop_tokens
        names = [name for name in plan.members if name in slot.verifiers]
        if not names:
            return []
        # a lossy rule looks at all that a model below the target thinks of, and a constraint may
        # leave rare tokens alone
        needs_all = plan.lossy is not None or request.constraint is not None
        named = [*stop, *request.sampling.logit_bias]
        # ids that end an answer may lie outside of the vocabulary, where nothing is drawn
        seen = None if needs_all else [token for token in named if token < self.models.vocab_size]
        verifiers = {
            name: slot.verifiers[name].seeing(
                plan.windows.get(name), self._features(slot, name, request), seen
            )
            for name in names
        }
        of_tree: type[BaseTreeStage] = TreeStage
        of_block: type[BaseBlockStage] = BlockStage
        sampler: Joiner
        parts: tuple[RoundParts, ...] = ()
        num_prompt_tokens = len(request.token_ids)
        if isinstance(plan.lossy, BigLittle):
            of_block, constraint = TolerantBlockStage, request.constraint
            sampler = TolerantSampler(request.sampling, num_prompt_tokens, plan.lossy, constraint)
        elif isinstance(plan.lossy, Judge):
            of_tree, of_block = RememberingTreeStage, JudgedBlockStage
            width = sum(verifier.decoder.config.hidden_size for verifier in verifiers.values())
            sampler = JudgingSampler(
                request.sampling, num_prompt_tokens, plan.lossy, width, request.constraint
            )
        elif self._parts is not None and self._stays_on_device(request):
            of_tree, of_block, parts = DeviceTreeStage, DeviceBlockStage, (self._parts,)
            sampler = self._device_sampler(self._parts, request, noise)
        else:
            device = self.models.device
            sampler = make_sampler(
                request.sampling, device, num_prompt_tokens, plan.rule, noise, request.constraint
            )
        stages = [make(of_tree, verifiers[names[-1]], drafter, sampler, stop, *parts)]
        for name in reversed(names[:-1]):
            given = verifiers[name], stages[0], sampler, plan.flush[name], stop
            stages.insert(0, make(of_block, *given, *parts))
        return stages

    def noise(self, request: Request) -> Noise | None:
        """The noise that all members draw with; None where they draw without."""
        here = self.models.here
        if request.sampling.is_greedy or request.plan.rule != "coupled" or here is None:
            return None
        return Noise(here, request.sampling.seeded())

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
        if self._parts is not None and plan.tree.least_probability:
            say(
                "draft trees of captured rounds all have as many rows: the plan's "
                f"least_probability {plan.tree.least_probability:g} is not used"
            )
        here = self.models.here
        if not self.graphs.is_active or here is None:
            return
        functions = [
            function for executor in self._executors for function in executor.known_passes()
        ]
        if self._parts is None:
            here.prepare(functions)
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
        here.prepare([*functions, *(step for _, _, step in steps)])
        self.graphs.prepare(steps, say)

    @property
    def _first(self) -> Slot:
        return self.slots.first

    def _tokens_of(self, request: Request) -> Generator[list[int], None, Statistics]:
        running = self.begin(request)
        with closing(self.pieces_of(running)) as pieces:
            for piece in pieces:
                if piece.token_ids:
                    yield piece.token_ids
        return running.statistics

    def _reap(self) -> None:
        for sequence in [sequence for sequence in self._running if sequence.is_over]:
            sequence.leave()
            self._running.remove(sequence)

    def reap(self) -> None:
        """Free the sequences of answers that were closed, unless a pass is under way: then it is
        done after that."""
        if self._stepping.acquire(blocking=False):
            try:
                self._reap()
            finally:
                self._stepping.release()

    def _features(self, slot: Slot, name: str, request: Request) -> tuple[int, ...]:
        """Layers that a verifier's states hold for the head that drafts, or may later."""
        drafter = request.plan.members[-1]
        if drafter not in self.models.drafters:
            drafter = request.kept_drafter or drafter
        head = self.models.drafters.get(drafter)
        return slot.verifiers[name].feature_layers if head and head.weights.feature_layers else ()

    def _stays_on_device(self, request: Request) -> bool:
        asks_logprobs = request.logprobs is not None or request.prompt_logprobs is not None
        is_free = request.constraint is None and not asks_logprobs
        return is_free and draws_on_device(request.sampling)

    def _device_sampler(
        self, parts: RoundParts, request: Request, noise: Noise | None
    ) -> DeviceSampler:
        plan = request.plan
        reports_confidence = any(flush.adaptive for flush in plan.flush.values())
        drawing = parts.drawing(request.sampling, plan.rule, reports_confidence)
        return DeviceSampler(request.sampling, drawing, noise)

    def check(self, request: Request) -> None:
        """Check what a request asks for, before anything is computed.

        Raises:
            UserError: an empty prompt, one that does not fit the context with its new tokens, or a
                token id outside of the vocabulary.
        """
        token_ids, vocab_size = request.token_ids, self.models.vocab_size
        # a number of another type would reach native code as other bytes
        if not isinstance(token_ids, list) or any(type(token) is not int for token in token_ids):
            raise UserError(
                "token ids are no list of integers",
                readable_value(token_ids),
                "give ids as chain.encode returns them",
            )
        if not token_ids:
            raise UserError("empty prompt", "0 tokens", "give at least one token")
        num_tokens, least = request.max_new_tokens, 1 if request.prompt_logprobs is None else 0
        if type(num_tokens) is not int or num_tokens < least:
            raise UserError(
                "nothing to generate",
                f"max_new_tokens={num_tokens!r}",
                f"use a whole number, {least} or more",
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
        if self.models.encoder is not None:
            check_source(request, self.models.encoder)
        if self.models.remote is not None:
            check_remote(request, self.models)


def rounds_of(
    root: Stage, request: Request, run: Callable[[Passes[Any]], Any] = alone
) -> Iterator[tuple[list[int], StoppedBy | None]]:
    """The new tokens of each of a request's rounds, run alone, and what ended the answer with them;
    None before its last round. The first ones, perhaps none, came with the prompt.

    Args:
        run: runs the passes of a round.
    """
    num_left, stopped_by = request.max_new_tokens, None
    with torch.inference_mode():
        tokens = run(root.start(request.token_ids)).tokens
        run(root.catch_up())
    while True:
        tokens, stopped_by = cut_at_end(tokens, num_left, request.stop_tokens, request.text)
        num_left -= len(tokens)
        yield tokens, stopped_by
        if stopped_by is not None:
            return
        with torch.inference_mode():
            tokens = run(root.propose(1, num_left)).tokens
