"""What rounds of several sequences cost on this machine, timed in the engine as it answers.

The engine's steps are timed, each of which runs a pass that some sequences share, and then what the
host does for them. Each of them bears an equal share of the step.
"""

import time
from collections import defaultdict
from collections.abc import Sequence
from itertools import cycle, islice
from typing import Any

import torch

from polybasic.chain.formats.plan import Plan
from polybasic.deploy.planner.measuring.answers import Calibration
from polybasic.deploy.planner.measuring.costs import RoundCosts
from polybasic.deploy.runtime.batching import ActiveSequence
from polybasic.deploy.runtime.request import Request
from polybasic.deploy.runtime.rounds.passes import DraftPass, VerifierPass

NUM_ROUNDS, NUM_BLOCKS = 10, 2
"""Of each sequence, in the mean: at least so many rounds, and of the target so many blocks."""
MAX_NEW_TOKENS = 512
"""More than any sequence gains in these rounds, so that all stay active."""


class LoadTimer:
    """Times rounds of plans with several sequences; see `polybasic.deploy.planner.loads`.

    Args:
        calibration: its prompts are answered, the first ones as often as is needed.
    """

    def __init__(self, calibration: Calibration) -> None:
        self._calibration, self._engine = calibration, calibration.engine

    @property
    def most_sequences(self) -> int:
        """That the engine can hold."""
        return self._engine.slots.num_fitting()

    @property
    def most_context(self) -> int:
        """Tokens of a context that leaves room for rounds; 0 where caches lie elsewhere, or rounds
        stay on a device."""
        models = self._engine.models
        if models.leader is not None or models.remote is not None or self._engine.captures_rounds:
            return 0
        return self._engine.context_tokens - MAX_NEW_TOKENS

    def __call__(self, plan: Plan, sequences: int, costs: RoundCosts) -> None:
        """Answer so many prompts at a time, without an end, until there were enough rounds."""
        prompts = islice(cycle(example.prompt for example in self._calibration.answered), sequences)
        self._time(plan, list(prompts), costs)

    def behind(self, tokens: int, plan: Plan, costs: RoundCosts) -> None:
        """The same of one sequence behind so many tokens, which nothing has read."""
        context = list(islice(cycle(self._calibration.answered[0].prompt), tokens))
        slot = self._engine.slots.first
        slot.drafters.of(plan)  # made before it is filled
        slot.fill_unread(context)
        try:
            self._time(plan, [context], costs)
        finally:
            slot.clear()

    def _time(self, plan: Plan, prompts: Sequence[list[int]], costs: RoundCosts) -> None:
        sequences = len(prompts)
        running = [self._begin(prompt, plan) for prompt in prompts]
        try:
            while not all(sequence.pieces for sequence in running):
                self._step(running)
            shares = _Shares(plan, list(self._engine.verifiers))
            while not shares.are_enough(sequences) and _all_active(running):
                waiting = [sequence.waiting for sequence in running]
                seconds = self._step(running)
                ran = [
                    was
                    for sequence, was in zip(running, waiting, strict=True)
                    if was is not None and sequence.waiting is not was
                ]
                shares.add(ran, seconds)
            shares.put_into(costs)
        finally:
            for sequence in running:
                sequence.close()

    def _begin(self, prompt: list[int], plan: Plan) -> ActiveSequence:
        room = self._engine.context_tokens - len(prompt)
        sampling = self._calibration.sampling
        request = Request(
            prompt, min(room, MAX_NEW_TOKENS), sampling, frozenset(), plan, reuses=True
        )
        return self._engine.begin(request, runs_ahead=True)

    def _step(self, running: list[ActiveSequence]) -> float:
        """Seconds of the engine's next step."""
        begin = self._now()
        self._engine.step()
        seconds = self._now() - begin
        for sequence in running:
            if sequence.error is not None:
                raise sequence.error
        return seconds

    def _now(self) -> float:
        device = self._engine.models.target.device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()


def _all_active(running: list[ActiveSequence]) -> bool:
    return not any(sequence.is_over for sequence in running)


class _Shares:
    """Seconds of each sequence's passes, by what they are.

    Args:
        verifying: names of the chain's verifying members.
    """

    def __init__(self, plan: Plan, verifying: list[str]) -> None:
        self._plan = plan
        names = [name for name in plan.members if name in verifying]
        self._innermost = names[-1]
        self._trees: dict[int, list[float]] = defaultdict(list)
        self._blocks: dict[tuple[str, int], list[float]] = defaultdict(list)
        self._drafts: list[float] = []

    def are_enough(self, sequences: int) -> bool:
        """Whether there were enough rounds of so many sequences."""
        num_rounds, num_blocks = (
            sum(map(len, shares.values())) for shares in (self._trees, self._blocks)
        )
        has_blocks = self._plan.members[0] != self._innermost
        return num_rounds >= NUM_ROUNDS * sequences and (
            not has_blocks or num_blocks >= NUM_BLOCKS * sequences
        )

    def add(self, ran: list[Any], seconds: float) -> None:
        """Add a step in which these passes ran together."""
        for member_pass in ran:
            share = seconds / len(ran)
            if isinstance(member_pass, DraftPass):
                self._drafts.append(share)
            elif isinstance(member_pass, VerifierPass):
                name, rows = member_pass.verifier.name, len(member_pass.rows)
                if name == self._innermost:
                    self._trees[rows].append(share)
                else:
                    self._blocks[name, rows].append(share)

    def put_into(self, costs: RoundCosts) -> None:
        """Add the shares to the costs, without steps in which the machine did something else."""
        drafter, tree = self._plan.members[-1], self._plan.tree
        if self._drafts:
            costs.levels[drafter, tree.top_k, tree.depth] += _usual(self._drafts)
        for rows, seconds in self._trees.items():
            costs.trees[self._innermost, rows] += _usual(seconds)
        for key, seconds in self._blocks.items():
            costs.blocks[key] += _usual(seconds)


def _usual(shares: list[float]) -> list[float]:
    """All but the largest and smallest eighth: of few steps, one that took long is many shares."""
    cut = len(shares) // 8
    return sorted(shares)[cut : len(shares) - cut]
