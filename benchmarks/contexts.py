"""Seconds a token behind long contexts: the target alone, with drafts, with an intermediate.

    python benchmarks/contexts.py CHAIN [--contexts 1024 4096 16384 32768] [--windows 1024]
        [--prefill-tokens 16384] [--max-new-tokens 32] [--turns 3] [--dtype bfloat16]
        [--threads N] [--json FILE]

Systems are the target, two models and all members, the latter with the intermediates' caches shared
and their own, and all that draft or propose besides with sliding windows. At each context they take
turns; all answers are greedy and the same. The first round of an answer is not counted.

A context is filled by a real prefill, which is timed, once for all systems and turns. Beyond
`--prefill-tokens` the rows of the last real one are repeated instead: passes cost what they would,
acceptance is that behind a text which repeats itself. And beyond the context that a chain is
declared for no text means anything: acceptance there is reported as it is.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
from record import console, header, print_header, write_record
from rich.console import Console
from rich.progress import track
from rich.table import Table
from systems import read_prompts, shown_plan, system_plans
from timing import Spread, clock_of, rotated
from torch import Tensor

from polybasic.chain.errors import UserError
from polybasic.chain.formats.config import read_config
from polybasic.chain.formats.plan import Plan, Window
from polybasic.deploy import Chain, load_chain
from polybasic.deploy.drafters.head import EagleDrafter
from polybasic.deploy.drafters.interface import Drafter
from polybasic.deploy.drafters.model import ModelDrafter
from polybasic.deploy.engine import Engine, Request
from polybasic.deploy.rounds.sampling import Sampling
from polybasic.deploy.rounds.stages import Stage
from polybasic.deploy.rounds.verifier import Verifier

CONTEXTS = (1024, 4096, 16384, 32768)
WINDOWS = (1024,)
PREFILL_TOKENS = 16384
ROOM_TOKENS = 512
"""Of a context, for rounds that gain more than they must."""
PROMPTS_PER_TASK = 64
"""Whose tokens are read one after the other, again and again where a context is longer."""


@dataclass(frozen=True)
class ContextSettings:
    """What is asked.

    Attributes:
        contexts: tokens before an answer, increasing.
        windows: latest tokens that members below the target see.
        prefill_tokens: of the longest context that is filled by a real prefill.
        max_new_tokens: that are timed in an answer.
    """

    contexts: tuple[int, ...] = CONTEXTS
    windows: tuple[int, ...] = WINDOWS
    prefill_tokens: int = PREFILL_TOKENS
    max_new_tokens: int = 32
    turns: int = 3


class FilledVerifier(Verifier):
    """A verifier whose prompt stands in its cache: reading it again takes no time.

    Attributes:
        prompt_states: of the prompt.
    """

    prompt_states: Tensor | None = None

    def read(self, token_ids: Sequence[int]) -> Tensor:
        states = self.prompt_states
        if self.cache.length == 0 and states is not None and len(states) == len(token_ids):
            return states
        return super().read(token_ids)


@dataclass
class System:
    """One way of answering.

    Attributes:
        engine: whose caches it reads; systems that fill them alike share one.
    """

    plan: Plan
    engine: Engine

    @property
    def verifiers(self) -> list[FilledVerifier]:
        """Those that run, from the target down."""
        found = [self.engine.verifiers.get(name) for name in self.plan.members]
        return [one for one in found if isinstance(one, FilledVerifier)]

    def stages(self, tokens: list[int], max_new_tokens: int) -> tuple[list[Stage], Drafter]:
        """As a greedy request makes them; nothing ends an answer early."""
        request = Request(tokens, max_new_tokens, Sampling(), (), self.plan)
        return self.engine.stages(request)

    def cache_bytes(self, num_rows: int) -> int:
        """Of the first rows of all caches that it reads."""
        caches = [verifier.cache for verifier in self.verifiers]
        drafter = self.engine.drafters.of(self.plan)
        if isinstance(drafter, EagleDrafter | ModelDrafter):
            caches.append(drafter.cache)
        distinct = {id(cache): cache for cache in caches}.values()
        return sum(layer[:, :num_rows].nbytes for cache in distinct for layer in cache.layers)


@dataclass
class SystemContext:
    """What a system took behind one context.

    Attributes:
        turns: seconds a token, one a turn.
        gained: of each verifying member, tokens gained by each counted pass of it.
    """

    tokens: list[int] = field(default_factory=list)
    turns: list[float] = field(default_factory=list)
    gained: dict[str, list[int]] = field(default_factory=dict)
    cache_bytes: int = 0

    @property
    def per_token(self) -> Spread:
        """Milliseconds a token, without the prefill."""
        return Spread.of_turns(self.turns).times(1e3)

    def to_json(self, target: "SystemContext") -> dict[str, Any]:
        """As a record holds it."""
        num = min(len(self.tokens), len(target.tokens))
        return {
            "milliseconds_per_token": self.per_token.to_json(),
            "speedup_vs_target": target.per_token.median / self.per_token.median,
            "accepted_lengths": {
                name: sum(gained) / len(gained) for name, gained in self.gained.items() if gained
            },
            "cache_bytes": self.cache_bytes,
            "answers_as_target": self.tokens[:num] == target.tokens[:num],
        }


@dataclass
class Context:
    """All that was measured behind so many tokens.

    Attributes:
        prefill_seconds: by what was read; None where rows were repeated instead.
    """

    num_tokens: int
    prefill_seconds: dict[str, float | None]
    systems: dict[str, SystemContext]

    def to_json(self) -> dict[str, Any]:
        """As a record holds it."""
        target = self.systems["target"]
        return {
            "prefill_seconds": self.prefill_seconds,
            "is_repeated": None in self.prefill_seconds.values(),
            "systems": {name: one.to_json(target) for name, one in self.systems.items()},
        }


def make_systems(chain: Chain, windows: Sequence[int]) -> dict[str, System]:
    """The systems of a chain, by name.

    Those that fill caches alike share an engine, and all of them share the target's cache.
    """
    plans, shared = system_plans(chain), chain.engine
    target = next(iter(shared.verifiers))
    _make_filled(shared)
    systems: dict[str, System] = {}
    for name in (one for one in ("target", "eagle2", "polybasic_full") if one in plans):
        for shown, plan in _with_windows(name, plans[name], windows).items():
            systems[shown] = System(plan, shared)
    if "polybasic_full" in plans:
        own = _with_windows("polybasic_full, own caches", plans["polybasic_full"], windows)
        for shown, plan in own.items():
            engine = Engine(shared.models, share_caches=False)
            _make_filled(engine)
            engine.verifiers[target] = shared.verifiers[target]
            systems[shown] = System(plan, engine)
    return systems


def _with_windows(name: str, plan: Plan, windows: Sequence[int]) -> dict[str, Plan]:
    """A plan, and the same with each window on all members below the target."""
    plans = {name: plan}
    below = plan.members[1:]
    for tokens in windows if below else ():
        update = {"windows": dict.fromkeys(below, Window(tokens=tokens))}
        plans[f"{name}, window {tokens}"] = plan.model_copy(update=update)
    return plans


def _make_filled(engine: Engine) -> None:
    for name, one in engine.verifiers.items():
        engine.verifiers[name] = FilledVerifier(name, one.decoder, one.cache)


class Contexts:
    """Fills contexts, the longer ones from the shorter ones where they are too long to be read.

    Args:
        texts: by their lengths, which grow.
    """

    def __init__(
        self,
        systems: Mapping[str, System],
        texts: Mapping[int, list[int]],
        settings: ContextSettings,
    ) -> None:
        self.systems, self.texts, self.settings = systems, texts, settings
        self.now = clock_of(systems["target"].engine.models.target.device)

    def measure(self, num_tokens: int) -> Context:
        """Fill a context and answer behind it with all systems, in turns."""
        prefill_seconds = self._fill(num_tokens)
        measured = {name: SystemContext() for name in self.systems}
        for turn in range(self.settings.turns):
            for name in rotated(list(self.systems), turn):
                self._answer(self.systems[name], num_tokens, measured[name])
        return Context(num_tokens, prefill_seconds, measured)

    @torch.inference_mode()
    def _fill(self, num_tokens: int) -> dict[str, float | None]:
        """Seconds by what was read."""
        tokens = self.texts[num_tokens]
        seconds: dict[str, float | None] = {}
        filled: set[int] = set()
        for name, system in self.systems.items():
            _, drafter = system.stages(tokens, 1)  # which hands the windows out
            for verifier in system.verifiers:
                if id(verifier.cache) not in filled:
                    filled.add(id(verifier.cache))
                    is_target = verifier.name == system.plan.members[0]
                    read = verifier.name if is_target else f"{verifier.name} of {name}"
                    seconds[read] = self._fill_verifier(verifier, tokens[:-1])
            if isinstance(drafter, EagleDrafter) and id(drafter) not in filled:
                filled.add(id(drafter))
                seconds[f"head of {name}"] = self._fill_head(drafter, system, tokens)
        return seconds

    def _fill_head(self, drafter: EagleDrafter, system: System, tokens: list[int]) -> float:
        states = [one.prompt_states for one in system.verifiers if one.prompt_states is not None]
        drafter.rewind(0)
        drafter.observe(states[-1])
        begin = self.now()
        drafter.draft(tokens, 1)
        return self.now() - begin

    def _fill_verifier(self, verifier: FilledVerifier, tokens: list[int]) -> float | None:
        """Read a prompt, or repeat the one that was read last; seconds of reading it."""
        states = verifier.prompt_states
        if states is not None and len(tokens) >= self.settings.prefill_tokens:
            verifier.prompt_states = _repeated(states, 0, len(tokens))
            for layer in verifier.cache.layers:
                layer[:, : len(tokens)] = _repeated(layer[:, : len(states)], 1, len(tokens))
            return None
        verifier.prompt_states = None
        verifier.cache.truncate(0)
        begin = self.now()
        verifier.prompt_states = verifier.read(tokens)
        return self.now() - begin

    @torch.inference_mode()
    def _answer(self, system: System, num_tokens: int, measured: SystemContext) -> None:
        """One answer; the round before the clock begins reads the last tokens of the prompt."""
        wanted = self.settings.max_new_tokens
        limit = wanted + 2 * _most_gained(system.plan)
        tokens = self.texts[num_tokens]
        stages, drafter = system.stages(tokens, limit)
        stages[0].prefill(tokens)
        if isinstance(drafter, EagleDrafter):
            # keys and values of a head's one layer depend on no window, hence on no system
            drafter.cache.length = num_tokens - 2
        answer = stages[0].propose(1, limit).tokens
        uncounted = {stage.verifier.name: len(stage.accepted_lengths) for stage in stages}
        num_before = len(answer)
        begin = self.now()
        while len(answer) < num_before + wanted:
            answer += stages[0].propose(1, limit - len(answer)).tokens
        measured.turns.append((self.now() - begin) / (len(answer) - num_before))
        measured.tokens = answer
        measured.cache_bytes = system.cache_bytes(num_tokens)
        for stage in stages:
            name = stage.verifier.name
            gained = stage.accepted_lengths[uncounted[name] :]
            measured.gained.setdefault(name, []).extend(gained)


def _repeated(rows: Tensor, dim: int, length: int) -> Tensor:
    """Rows along a dimension, again from the first on until there are so many."""
    places = torch.arange(length, device=rows.device) % rows.shape[dim]
    return rows.index_select(dim, places)


def _most_gained(plan: Plan) -> int:
    """Tokens that a round of the target gains at most."""
    longest = max((flush.length for flush in plan.flush.values()), default=0)
    return longest + plan.tree.depth + len(plan.members)


def long_texts(chain: Chain, contexts: Sequence[int]) -> dict[int, list[int]]:
    """A text of each length: embedded prompts one after the other, and a whole one at the end."""
    last, *prompts = read_prompts(chain, None, PROMPTS_PER_TASK, 1)
    before = cycle([token for prompt in prompts for token in prompt])
    return {num: [*islice(before, max(num - len(last), 0)), *last][:num] for num in contexts}


def print_contexts(
    contexts: Sequence[Context], systems: Mapping[str, System], chain: Chain
) -> None:
    """A table for each context."""
    for name, system in systems.items():
        print(f"{name}: {shown_plan(system.plan, chain)}")
    for context in contexts:
        print(f"\n{context.num_tokens:,} tokens; seconds of prefill:")
        for name, seconds in context.prefill_seconds.items():
            print(f"  {name}: {'repeated, not read' if seconds is None else f'{seconds:.2f}'}")
        table = Table("system", title="milliseconds a token behind the prefill")
        columns = ["min", "median", "max", "speedup", "caches, MB", "tokens a pass", "identical"]
        for column in columns:
            table.add_column(column, justify="right")
        target = context.systems["target"]
        for name, one in context.systems.items():
            content = one.to_json(target)
            spread = one.per_token
            lengths = (f"{mean:.2f}" for mean in content["accepted_lengths"].values())
            table.add_row(
                name,
                *(f"{value:.2f}" for value in (spread.min, spread.median, spread.max)),
                f"{content['speedup_vs_target']:.2f}x",
                f"{one.cache_bytes / 1e6:.1f}",
                " / ".join(lengths),
                "yes" if content["answers_as_target"] else "no",
            )
        console().print(table)


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("chain", type=Path)
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS)
    parser.add_argument("--windows", type=int, nargs="*", default=WINDOWS, metavar="TOKENS")
    parser.add_argument("--prefill-tokens", type=int, default=PREFILL_TOKENS)
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, help="default: torch's own choice")
    parser.add_argument("--json", type=Path, help="write the record here")
    return parser.parse_args(arguments)


def main() -> None:
    arguments = parsed()
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    settings = ContextSettings(
        tuple(sorted(arguments.contexts)),
        tuple(arguments.windows),
        arguments.prefill_tokens,
        arguments.max_new_tokens,
        arguments.turns,
    )
    longest = settings.contexts[-1]
    chain = load_chain(
        arguments.chain,
        dtype=arguments.dtype,
        context_tokens=longest + settings.max_new_tokens + ROOM_TOKENS,
        beyond_declared=True,
    )
    device = chain.engine.models.target.device
    head = header("contexts", device, {arguments.chain: "CHAIN", arguments.json: "FILE"})
    print_header(head)
    declared = read_config(chain.target_folder).decoder.context_tokens
    print(f"declared for {declared:,} tokens, behind which texts and acceptance mean nothing")
    systems = make_systems(chain, settings.windows)
    contexts = Contexts(systems, long_texts(chain, settings.contexts), settings)
    shown = track(settings.contexts, "contexts", console=Console(stderr=True))
    measured = [contexts.measure(num_tokens) for num_tokens in shown]
    print_contexts(measured, systems, chain)
    content = {
        "settings": {**vars(settings), "dtype": arguments.dtype},
        "declared_context_tokens": declared,
        "plans": {name: one.plan.model_dump(mode="json") for name, one in systems.items()},
        "contexts": {str(one.num_tokens): one.to_json() for one in measured},
    }
    write_record(arguments.json, head, content)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
