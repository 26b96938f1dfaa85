"""What one pass of each member of a chain costs, by rows, and what a draft costs, by shape.

    python benchmarks/passes.py CHAIN [--context 256] [--dtype bfloat16] [--rows 1 4 8]
        [--shapes 7x4] [--only NAME ...] [--repeats 12] [--turns 5] [--threads N] [--json FILE]

A pass is what a verifying member does in a round: states, logits and the choice of tokens. Printed
are minimum, median and maximum in milliseconds, and beside them the bound: the bytes that the pass
must move (benchmarks/traffic.py) over the best bandwidth that was measured in the same run. The
members take turns, call by call, so that a drift of the machine hits all alike and nobody finds its
weights in a cache because it ran just before.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from record import console, header, print_header, write_record
from rich.table import Table
from timing import Bandwidth, Spread, in_turns, measure_bandwidth
from traffic import Moved, member_draft, member_pass

from polybasic.chain.errors import UserError
from polybasic.chain.formats.plan import Tree
from polybasic.deploy import Chain, load_chain
from polybasic.deploy.engine import CONTEXT_TOKENS_BY_DEFAULT, Drafters
from polybasic.deploy.rounds.sampling import Prefixes, Sampling, make_sampler
from polybasic.deploy.rounds.verifier import SPARE_ROWS

ROWS = (1, 2, 4, 8, 12, 16, 24, 32)
SHAPES = ("1x4", "2x4", "5x4", "7x2", "7x4", "7x8", "10x2", "10x4")
NEW_TOKENS = 4
"""Observed since the draft before."""


@dataclass(frozen=True)
class PassSettings:
    """What is measured.

    Attributes:
        context: tokens before the pass.
        rows: of passes.
        shapes: of drafts, "depth x top_k".
        repeats: calls of each in a turn.
        only: members; none for all.
    """

    context: int = 256
    rows: tuple[int, ...] = ROWS
    shapes: tuple[str, ...] = SHAPES
    repeats: int = 12
    turns: int = 5
    only: tuple[str, ...] = ()


@dataclass(frozen=True)
class Cost:
    """Of a pass or a whole draft.

    Attributes:
        seconds: what it takes.
        moved: what it must move.
        bound_seconds: what moving that takes at least.
    """

    seconds: Spread
    moved: Moved
    bound_seconds: float

    @property
    def times_bound(self) -> float:
        """The median over the bound."""
        return self.seconds.median / self.bound_seconds

    def to_json(self) -> dict[str, Any]:
        """As a record holds it."""
        return {
            "milliseconds": self.seconds.times(1e3).to_json(),
            "bytes": {**vars(self.moved), "total": self.moved.total},
            "bound_milliseconds": 1e3 * self.bound_seconds,
            "times_bound": self.times_bound,
        }


@dataclass(frozen=True)
class PassTimes:
    """What was measured.

    Attributes:
        passes: member -> rows -> cost.
        drafts: drafter -> "depth x top_k" -> cost.
    """

    passes: dict[str, dict[int, Cost]]
    drafts: dict[str, dict[str, Cost]]

    def to_json(self) -> dict[str, Any]:
        """As a record holds it."""
        return {
            kind: {
                name: {str(key): cost.to_json() for key, cost in costs.items()}
                for name, costs in of_kind.items()
            }
            for kind, of_kind in vars(self).items()
        }


@torch.inference_mode()
def measure_passes(chain: Chain, settings: PassSettings, bandwidth: Bandwidth) -> PassTimes:
    """Time passes and drafts of a chain's members.

    Raises:
        UserError: a context that the chain has no room for, or members that it does not have.
    """
    _check(chain, settings)
    device = chain.engine.models.target.device

    def costs(runs: dict[Any, Callable[[], object]], moved: dict[Any, Moved]) -> dict[Any, Cost]:
        found = in_turns(runs, settings.turns, settings.repeats, device)
        return {
            key: Cost(seconds, moved[key], moved[key].total / bandwidth.bound)
            for key, seconds in found.items()
        }

    def is_asked_for(name: str) -> bool:
        return not settings.only or name in settings.only

    passes: dict[str, dict[int, Cost]] = {
        name: {} for name in chain.engine.verifiers if is_asked_for(name)
    }
    for rows in settings.rows:
        runs = {name: _pass(chain, name, settings.context, rows) for name in passes}
        moved = {name: member_pass(chain, name, settings.context, rows) for name in passes}
        for name, cost in costs(runs, moved).items():
            passes[name][rows] = cost
    drafts: dict[str, dict[str, Cost]] = {}
    for name in filter(is_asked_for, chain.engine.models.drafters):
        shapes = {shape: _tree(shape) for shape in settings.shapes}
        runs = {shape: _draft(chain, name, tree, settings) for shape, tree in shapes.items()}
        moved = {
            shape: member_draft(chain, name, settings.context, tree.depth, tree.top_k)
            for shape, tree in shapes.items()
        }
        drafts[name] = costs(runs, moved)
    return PassTimes(passes, drafts)


def _check(chain: Chain, settings: PassSettings) -> None:
    if not 2 * NEW_TOKENS <= settings.context <= chain.engine.context_tokens:
        raise UserError(
            "context out of range",
            f"--context {settings.context}",
            f"use {2 * NEW_TOKENS} to {chain.engine.context_tokens}",
        )
    if not 1 <= min(settings.rows, default=1) <= max(settings.rows, default=1) <= SPARE_ROWS:
        raise UserError("rows out of range", f"--rows {settings.rows}", f"use 1 to {SPARE_ROWS}")
    members = [*chain.engine.verifiers, *chain.engine.models.drafters]
    for name in settings.only:
        if name not in members:
            raise UserError("no such member", f"--only {name}", f"members: {', '.join(members)}")


def _tree(shape: str) -> Tree:
    try:
        depth, top_k = map(int, shape.split("x"))
        return Tree(depth=depth, top_k=top_k, rows=24)
    except ValueError as error:
        raise UserError("no shape of a draft", f"--shapes {shape}", "write 7x4") from error


def _pass(chain: Chain, name: str, context: int, rows: int) -> Callable[[], object]:
    """A pass of `rows` tokens behind `context` ones, with all that a round makes of it."""
    verifier = chain.engine.verifiers[name]
    tokens = torch.randint(0, verifier.decoder.config.vocab_size, (rows,)).tolist()
    prefixes = Prefixes(tokens[:1], [tokens[1:end] for end in range(1, rows + 1)])
    sampler = make_sampler(Sampling(temperature=0.0), verifier.decoder.device, 1)

    def run() -> object:
        # nothing is moved, and rows that are not kept are forgotten with the next pass
        verifier.cache.truncate(0)
        verifier.cache.keep(range(context))
        states = verifier.read(tokens)
        distributions = sampler.distributions(verifier.logits(states), prefixes)
        return [sampler.draw(distributions, row) for row in range(rows)]

    return run


def _draft(chain: Chain, name: str, tree: Tree, settings: PassSettings) -> Callable[[], object]:
    """A whole draft behind `settings.context` tokens, `NEW_TOKENS` of them new."""
    context, models = settings.context, chain.engine.models
    # of its own: a change of shape is no part of a draft
    drafter = Drafters(models, context + 2 * SPARE_ROWS).named(name, tree)
    decoder = models.decoders[chain.manifest.member(name).drafts_for[0]]
    tokens = torch.randint(0, decoder.config.vocab_size, (context + 1,)).tolist()
    states = torch.randn(context, decoder.states_width).to(decoder.device, decoder.dtype)
    drafter.observe(states)
    drafter.draft(tokens, tree.depth)

    def run() -> object:
        drafter.rewind(context - NEW_TOKENS)
        drafter.observe(states[context - NEW_TOKENS :])
        return drafter.draft(tokens, tree.depth)

    return run


def print_passes(times: PassTimes) -> None:
    """Tables: passes by member and rows, drafts by shape."""
    target = next(iter(times.passes), None)
    if target is not None:
        table = _table("milliseconds a pass", "member", "rows", f"of {target}'s")
        for name, by_rows in times.passes.items():
            for rows, cost in by_rows.items():
                share = cost.seconds.median / times.passes[target][rows].seconds.median
                table.add_row(name, str(rows), *_cells(cost), f"{share:.2f}")
        console().print(table)
    if times.drafts:
        table = _table("milliseconds a draft", "drafter", "depth x top k")
        for name, by_shape in times.drafts.items():
            for shape, cost in by_shape.items():
                table.add_row(name, shape, *_cells(cost))
        console().print(table)


def _table(title: str, first: str, second: str, *last: str) -> Table:
    table = Table(first, title=title, title_justify="left")
    for name in (second, "min", "median", "max", "MB", "bound", "times bound", *last):
        table.add_column(name, justify="right")
    return table


def _cells(cost: Cost) -> list[str]:
    seconds = cost.seconds
    numbers = [f"{1e3 * one:.3f}" for one in (seconds.min, seconds.median, seconds.max)]
    megabytes = f"{cost.moved.total / 1e6:.1f}"
    return [*numbers, megabytes, f"{1e3 * cost.bound_seconds:.3f}", f"{cost.times_bound:.2f}"]


def load_for(path: Path, dtype: str, threads: int | None, context: int) -> Chain:
    """A chain with room for `context` tokens, run by so many threads (default: torch's own)."""
    if threads is not None:
        torch.set_num_threads(threads)
    long = context if context > CONTEXT_TOKENS_BY_DEFAULT else None
    return load_chain(path, dtype=dtype, context_tokens=long)


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("chain", type=Path)
    parser.add_argument("--context", type=int, default=256, help="tokens before the pass")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rows", type=int, nargs="*", default=ROWS)
    parser.add_argument("--shapes", nargs="*", default=SHAPES, metavar="DEPTHxTOP_K")
    parser.add_argument("--only", nargs="+", default=(), metavar="NAME", help="these members")
    parser.add_argument("--repeats", type=int, default=12, help="calls of each in a turn")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--threads", type=int, help="default: torch's own choice")
    parser.add_argument("--json", type=Path, help="write the record here")
    return parser.parse_args(arguments)


def main() -> None:
    arguments = parsed()
    chain = load_for(arguments.chain, arguments.dtype, arguments.threads, arguments.context)
    device = chain.engine.models.target.device
    head = header("passes", device, {arguments.chain: "CHAIN", arguments.json: "FILE"})
    print_header(head)
    bandwidth = measure_bandwidth(device)
    print(f"{bandwidth.shown()}; context {arguments.context}, {arguments.dtype}")
    settings = PassSettings(
        arguments.context,
        tuple(arguments.rows),
        tuple(arguments.shapes),
        arguments.repeats,
        arguments.turns,
        tuple(arguments.only),
    )
    times = measure_passes(chain, settings, bandwidth)
    print_passes(times)
    content = {
        "settings": {**vars(settings), "dtype": arguments.dtype},
        "bandwidth": bandwidth.to_json(),
        **times.to_json(),
    }
    write_record(arguments.json, head, content)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
