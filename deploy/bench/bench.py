"""A benchmark under way: what is asked, who answers, and what was answered so far."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from polybasic.deploy.bench.energy import EnergyMeter
from polybasic.deploy.bench.journal import JournalEntry, Turn
from polybasic.deploy.bench.noise import Quiet
from polybasic.deploy.bench.prompts import BenchPrompt
from polybasic.deploy.bench.schema import PromptReport
from polybasic.deploy.bench.systems.catalogue import Systems
from polybasic.deploy.bench.systems.system import System
from polybasic.deploy.planner.settings import BenchSettings
from polybasic.deploy.runtime.chain import Chain
from polybasic.deploy.runtime.rounds.sampling import Sampling


@dataclass(frozen=True)
class Bench:
    """A benchmark and what was answered so far.

    Attributes:
        prompts_named: what people call these prompts.
        num_too_long: questions that do not fit the context.
        turns: by (repeat, prompt).
        quiet: watches the machine meanwhile.
        meter: counts its energy.
        memory: stated and measured, of the chain.
        command: that asked for it.
    """

    chain: Chain
    systems: Systems
    settings: BenchSettings
    prompts: list[BenchPrompt]
    prompts_named: str
    num_too_long: int
    turns: Mapping[tuple[int, int], Turn]
    quiet: Quiet
    meter: EnergyMeter
    memory: dict[str, Any]
    command: str

    @cached_property
    def described(self) -> list[PromptReport]:
        """The prompts as a report holds them."""
        decode = self.chain.tokenizer.decode
        return [prompt.described(decode(prompt.token_ids)) for prompt in self.prompts]

    @property
    def target(self) -> System:
        """What speedups are counted over."""
        return next(system for system in self.systems.running if system.name == "target")

    @property
    def num_repeats(self) -> float:
        """How often the prompts were answered; a repeat that was interrupted is a part of one."""
        return len(self.turns) / len(self.prompts)

    def of(self, system: System) -> list[list[JournalEntry]]:
        """A system's answers, [repeat][prompt], as far as they were given."""
        return [
            [
                self.turns[repeat, place][system.name]
                for place in range(len(self.prompts))
                if (repeat, place) in self.turns
            ]
            for repeat in range(self.settings.repeats)
            if (repeat, 0) in self.turns
        ]

    def at(self, system: System, places: Sequence[int]) -> list[list[JournalEntry]]:
        """The same by prompt: [place][repeat]."""
        answers = self.of(system)
        return [[repeat[place] for repeat in answers if place < len(repeat)] for place in places]

    def sampling(self, repeat: int, place: int) -> Sampling:
        """Of the answer to a prompt: each has a seed of its own, the same for all systems."""
        number = repeat * len(self.prompts) + place
        return Sampling(self.settings.temperature, seed=(self.settings.seed + number) % 2**32)
