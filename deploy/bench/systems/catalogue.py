"""All systems of a benchmark: this runtime's, those of transformers, and other engines."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.plan import Plan
from polybasic.deploy.bench.peers.catalogue import check_peers
from polybasic.deploy.bench.peers.systems import peer_systems
from polybasic.deploy.bench.prompts import BenchPrompt
from polybasic.deploy.bench.systems import chain_systems
from polybasic.deploy.bench.systems.chain_systems import ChainSystem, LossySystem, chain_system
from polybasic.deploy.bench.systems.system import System
from polybasic.deploy.bench.systems.transformers_systems import (
    LACKING,
    drafting_model,
    transformers_systems,
)
from polybasic.deploy.planner.settings import BenchSettings
from polybasic.deploy.runtime.chain import Chain, check_draws, checked_plan
from polybasic.deploy.runtime.rounds.sampling import Sampling

TRANSFORMERS = ("hf_generate", "hf_static", "hf_prompt_lookup", "hf_assisted")
AS_A_PEER = ("hf_generate", "hf_prompt_lookup", "hf_assisted")
"""What the peer `transformers` stands for: its loop alone, and its two ways of speculating."""


@dataclass(frozen=True)
class Systems:
    """Those that run, in the order of reports, and why others do not.

    Attributes:
        notes: a sentence for each that was asked for and is left out.
    """

    running: list[System]
    notes: list[str]

    @property
    def own(self) -> list[ChainSystem]:
        """This runtime's."""
        return [system for system in self.running if isinstance(system, ChainSystem)]


def check_systems(settings: BenchSettings) -> None:
    """Refuse what can be refused before a model is loaded.

    Raises:
        UserError: the target, over which speedups are counted, is not among the systems, or a
            peer is not installed.
    """
    check_peers(engines(settings), Path(settings.peers_python), ("transformers",))
    if "target" not in settings.expected_systems:
        raise UserError(
            "no baseline",
            f"bench.systems={','.join(settings.expected_systems)}",
            "add target, over which speedups are counted",
        )


def own_systems(
    chain: Chain, settings: BenchSettings, lossy: Plan | None = None
) -> list[ChainSystem]:
    """This runtime's, as far as they are asked for.

    Args:
        lossy: a plan that runs beside them.

    Raises:
        UserError: a system that the chain has no members for, or a plan that it cannot run.
    """
    names = [name for name in _names(chain, settings) if _is_own(name)]
    systems = [chain_system(name, chain, settings.rule) for name in names]
    if lossy is not None:
        check_draws(checked_plan(lossy, chain.manifest), Sampling(settings.temperature))
        systems.append(LossySystem(chain, lossy))
    return systems


def with_others(
    own: Sequence[ChainSystem],
    chain: Chain,
    settings: BenchSettings,
    prompts: Sequence[BenchPrompt],
    say: Callable[[str], None],
    stack: ExitStack,
) -> Systems:
    """All systems; those of other libraries are loaded, and given up at the end of `stack`.

    Raises:
        UserError: a system that the chain has no members for.
    """
    names, notes = _names(chain, settings), []
    is_extra = "hf_assisted" in names and "hf_assisted" not in settings.systems
    if is_extra and drafting_model(chain) is None:
        names.remove("hf_assisted")
        notes.append(f"hf_assisted does not run: the chain has no {LACKING}.")
    loops, left_out = transformers_systems(
        [name for name in names if not _is_own(name)],
        chain,
        [prompt.token_ids for prompt in prompts],
        settings.max_new_tokens,
        say,
    )
    notes += [f"{name} does not run: {why}." for name, why in left_out.items()]
    python, is_greedy = Path(settings.peers_python), settings.temperature == 0
    peers = stack.enter_context(peer_systems(engines(settings), chain, python, say, is_greedy))
    for system in loops:
        stack.callback(system.close)
    by_name: dict[str, System] = {system.name: system for system in (*own, *loops)}
    named = dict.fromkeys((*names, *(system.name for system in own)))
    running = [by_name[name] for name in named if name in by_name]
    return Systems([*running, *peers.systems], [*notes, *peers.missing])


def engines(settings: BenchSettings) -> list[str]:
    """Peers that run in an environment of their own."""
    return [name for name in settings.peers if name != "transformers"]


def _names(chain: Chain, settings: BenchSettings) -> list[str]:
    target, *others = chain_systems.all_systems(chain)
    every = target, *TRANSFORMERS, *others
    names = list(settings.named_systems(chain_systems.usual_systems(chain), every))
    if "transformers" in settings.peers:
        names += [name for name in AS_A_PEER if name not in names]
    return names


def _is_own(name: str) -> bool:
    return name in chain_systems.NAMES
