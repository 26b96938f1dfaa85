"""What one pass of each member of a chain costs, by rows, and what a draft costs, by shape.

    python benchmarks/passes.py CHAIN [--device cpu] [--contexts 256] [--rows 1 4 8] [--shapes 7x4]
        [--only NAME ...] [--record FILE]

A pass is what a verifying member does in a round: states, logits and the choice of tokens. Beside
its milliseconds stands the bound: the bytes that it must move (benchmarks/traffic.py) over the
bandwidth that was measured in the same run. The members take turns, call by call, so that a drift
of the machine hits all alike and nobody finds its weights in a cache because it ran just before.

On a GPU passes and drafts are captured as graphs, as rounds run them.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from command import ScriptReport, begin, load, options, positive, run
from measuring import Bandwidth, Case, Spread, all_of, captured, in_turns, measure_bandwidth
from traffic import Moved, member_draft, member_pass

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.plan import Tree
from polybasic.chain.kernels.cuda.graphs import Graphs
from polybasic.chain.kernels.torch.rows import device_consecutive_rows
from polybasic.deploy import Chain
from polybasic.deploy.runtime.graphs.round_parts import device_executor
from polybasic.deploy.runtime.models import CONTEXT_TOKENS_BY_DEFAULT
from polybasic.deploy.runtime.rounds.cache import KeyValueCache
from polybasic.deploy.runtime.rounds.sampling import Prefixes, Sampling, make_sampler
from polybasic.deploy.runtime.rounds.verifier import SPARE_ROWS, Verifier
from polybasic.deploy.runtime.slots import Drafters

ROWS = (1, 2, 4, 8, 12, 16, 24, 32)
SHAPES = ("1x4", "2x4", "5x4", "7x2", "7x4", "7x8", "10x2", "10x4")
NEW_TOKENS = 4
"""Observed since the draft before."""
GRAPHS = 4
"""Kept at a time, of passes that are not run again."""


@dataclass(frozen=True)
class PassSettings:
    """What is measured.

    Attributes:
        contexts: tokens before a pass; drafts stand after the first of them.
        rows: of passes.
        shapes: of drafts, "depth x top_k".
        repeats: calls of each in a turn.
        only: members; none for all.
    """

    contexts: tuple[int, ...] = (256,)
    rows: tuple[int, ...] = ROWS
    shapes: tuple[str, ...] = SHAPES
    repeats: int = 12
    turns: int = 5
    only: tuple[str, ...] = ()


@dataclass(frozen=True)
class Cost:
    """Of a pass or a whole draft.

    Attributes:
        what: "4 rows", or the shape of a draft.
        moved: what it must move.
        bound_seconds: what moving that takes at least.
    """

    member: str
    what: str
    context: int
    seconds: Spread
    moved: Moved
    bound_seconds: float

    @property
    def times_bound(self) -> float:
        """The median over the bound."""
        return self.seconds.median / self.bound_seconds


def pass_cases(chain: Chain, settings: PassSettings, bandwidth: Bandwidth) -> Iterator[Case[Cost]]:
    """Passes of all verifying members in turns, a case for each context and number of rows."""
    check(chain, settings)
    graphs = _graphs(chain)
    members = [name for name in chain.engine.verifiers if _is_asked_for(name, settings)]
    decoders = {name: chain.engine.verifiers[name].decoder for name in members}
    measured = [(name, True) for name in members]
    measured += [(name, False) for name in members if decoders[name].shortlist() is not None]

    @torch.inference_mode()
    def measure(context: int, rows: int) -> list[Cost]:
        runs = {}
        for name, is_listed in measured:
            run_pass = pass_of(chain, name, context, rows, is_listed)
            runs[name, is_listed] = captured(graphs, (name, context, rows), run_pass)
        found = in_turns(runs, settings.turns, settings.repeats, graphs.device)
        costs = []
        for (name, is_listed), seconds in found.items():
            moved = member_pass(chain, name, context, rows)
            if not is_listed:
                moved = replace(moved, lm_head=moved.lm_head + decoders[name].bytes_left_out)
            bound = moved.total / bandwidth.bound
            shown = name if is_listed else f"{name}, all tokens"
            costs.append(Cost(shown, f"{rows} rows", context, seconds, moved, bound))
        return costs

    for context in settings.contexts:
        for rows in settings.rows if members else ():
            yield f"passes of {rows} rows after {context} tokens", partial(measure, context, rows)


def draft_cases(chain: Chain, settings: PassSettings, bandwidth: Bandwidth) -> Iterator[Case[Cost]]:
    """Whole drafts, a case for each drafter and shape."""
    check(chain, settings)
    graphs, context = _graphs(chain), settings.contexts[0]

    @torch.inference_mode()
    def measure(name: str, tree: Tree, shape: str) -> list[Cost]:
        run_draft = captured(graphs, (name, shape), _draft(chain, name, tree, context))
        found = in_turns({name: run_draft}, settings.turns, settings.repeats, graphs.device)
        moved = member_draft(chain, name, context, tree.depth, tree.top_k)
        bound = moved.total / bandwidth.bound
        return [Cost(name, shape, context, found[name], moved, bound)]

    for name in chain.engine.models.drafters:
        if _is_asked_for(name, settings):
            for shape in settings.shapes:
                yield f"draft {shape} of {name}", partial(measure, name, tree_of(shape), shape)


def _graphs(chain: Chain) -> Graphs:
    target = chain.engine.models.target
    # passes that wait for the host cannot be captured
    enabled = chain.engine.graphs.enabled and target.runs_on_device
    return Graphs(target.device, enabled, max_graphs=GRAPHS)


def _is_asked_for(name: str, settings: PassSettings) -> bool:
    return not settings.only or name in settings.only


def check(chain: Chain, settings: PassSettings) -> None:
    """Whether the chain can be measured so.

    Raises:
        UserError: a context, a number of rows or a member that there is not.
    """
    for context in settings.contexts:
        if not 2 * NEW_TOKENS <= context <= chain.engine.context_tokens:
            raise UserError(
                "context out of range",
                f"--contexts {context}",
                f"use {2 * NEW_TOKENS} to {chain.engine.context_tokens}",
            )
    if max(settings.rows, default=1) > SPARE_ROWS:
        raise UserError("rows out of range", f"--rows {settings.rows}", f"use 1 to {SPARE_ROWS}")
    members = [*chain.engine.verifiers, *chain.engine.models.drafters]
    for name in settings.only:
        if name not in members:
            raise UserError("no such member", f"--only {name}", f"members: {', '.join(members)}")


def tree_of(shape: str) -> Tree:
    """A tree of a shape "depth x top_k".

    Raises:
        UserError: it is none.
    """
    try:
        depth, top_k = map(int, shape.split("x"))
        return Tree(depth=depth, top_k=top_k, rows=24)
    except ValueError as error:
        raise UserError("no shape of a draft", f"--shapes {shape}", "write 7x4") from error


def pass_of(
    chain: Chain, name: str, context: int, rows: int, is_listed: bool = True
) -> Callable[[], None]:
    """A pass of a member over so many rows after a context, with all that a round makes of it.

    Args:
        is_listed: whether the member leaves rare tokens out where it can.
    """
    verifier = chain.engine.verifiers[name]
    verifier = verifier.seeing(verifier.window, None, [] if is_listed else None)
    make = _device_pass if verifier.decoder.runs_on_device else _host_pass
    return make(verifier, context, rows)


def _host_pass(verifier: Verifier, context: int, rows: int) -> Callable[[], None]:
    """The pass, with all that a round makes of it."""
    # frequent ones, as texts have
    tokens = torch.randint(0, verifier.decoder.config.vocab_size // 8, (rows,)).tolist()
    prefixes = Prefixes(tokens[:1], [tokens[1:end] for end in range(1, rows + 1)])
    sampler = make_sampler(Sampling(temperature=0.0), verifier.decoder.device, 1)
    verifier.cache.fill(context)

    def run_pass() -> None:
        # nothing is moved, and rows that are not kept are forgotten with the next pass
        states = verifier.read(tokens)
        distributions = sampler.distributions(verifier.logits(states), prefixes)
        for row in range(rows):
            sampler.draw(distributions, row)

    return run_pass


def _device_pass(verifier: Verifier, context: int, rows: int) -> Callable[[], None]:
    """The same as a round runs it on a GPU, up to the choice of tokens."""
    model, caches = device_executor(verifier), [verifier.cache.layers]
    prefix = torch.tensor(context, device=model.device)
    tokens = torch.randint(0, model.config.vocab_size, (rows,)).to(model.device)
    chosen = torch.zeros(rows, dtype=torch.int64, device=model.device)

    def run_pass() -> None:
        states = model.forward(tokens, caches, [device_consecutive_rows(prefix, rows)])
        chosen.copy_(model.operations.most_probable(model.logits_on_device(states)))

    return run_pass


def _draft(chain: Chain, name: str, tree: Tree, context: int) -> Callable[[], None]:
    """A whole draft after `context` tokens."""
    make = _device_draft if chain.engine.models.drafters[name].runs_on_device else _host_draft
    return make(chain, name, tree, context)


def _host_draft(chain: Chain, name: str, tree: Tree, context: int) -> Callable[[], None]:
    models = chain.engine.models
    # of its own: a change of shape is no part of a draft
    drafters = Drafters(models, context + 2 * SPARE_ROWS, chain.engine.slots.first.caches)
    drafter = drafters.named(name, tree)
    verifier = chain.engine.verifiers[chain.manifest.member(name).drafts_for[0]]
    decoder = verifier.decoder
    tokens = torch.randint(0, decoder.config.vocab_size, (context + 1,)).tolist()
    states = torch.randn(context, verifier.states_width).to(decoder.device, decoder.dtype)
    drafter.observe(states)
    drafter.draft(tokens, tree.depth)

    def run_draft() -> None:
        drafter.rewind(context - NEW_TOKENS)
        drafter.observe(states[context - NEW_TOKENS :])
        drafter.draft(tokens, tree.depth)

    return run_draft


def _device_draft(chain: Chain, name: str, tree: Tree, context: int) -> Callable[[], None]:
    model = chain.engine.models.drafters[name]
    num_layers, capacity = len(model.weights.layers), context + SPARE_ROWS
    cache = KeyValueCache(model.config, num_layers, capacity, model.dtype, model.device)
    state = torch.randn(1, model.config.hidden_size).to(model.device, model.dtype)
    start = torch.tensor(context, device=model.device)
    return lambda: model.draft(state, cache.layers, start, tree.depth, tree.top_k)


COLUMNS = ["context", "min", "median", "max", "MB", "bound", "times bound"]


def report_passes(report: ScriptReport, costs: Sequence[Cost]) -> None:
    """A row for each member, context and number of rows."""
    target = costs[0].member if costs else ""
    of_target = {
        (cost.what, cost.context): cost.seconds.median for cost in costs if cost.member == target
    }
    rows = []
    for cost in costs:
        alone = of_target.get((cost.what, cost.context))
        rows.append([*_cells(cost), "" if alone is None else f"{cost.seconds.median / alone:.2f}"])
    report.table("Milliseconds a pass", ["member", "rows", *COLUMNS, f"of {target}'s"], rows)


def report_drafts(report: ScriptReport, costs: Sequence[Cost]) -> None:
    """A row for each drafter and shape."""
    rows = [_cells(cost) for cost in costs]
    report.table("Milliseconds a draft", ["drafter", "depth x top k", *COLUMNS], rows)


def _cells(cost: Cost) -> list[str]:
    return [
        cost.member,
        cost.what.removesuffix(" rows"),
        str(cost.context),
        *cost.seconds.times(1e3).cells(),
        f"{cost.moved.total / 1e6:.1f}",
        f"{1e3 * cost.bound_seconds:.3f}",
        f"{cost.times_bound:.2f}",
    ]


def room_for(contexts: Sequence[int]) -> int:
    """What a chain is loaded with; 0 for what it is declared for."""
    longest = max(contexts, default=0)
    return longest if longest > CONTEXT_TOKENS_BY_DEFAULT else 0


def main() -> None:
    parser = options(__doc__, "chain", "--device", "--dtype", "--turns", "--repeats")
    parser.add_argument("--contexts", type=positive, nargs="+", default=(256,), metavar="TOKENS")
    parser.add_argument("--rows", type=positive, nargs="*", default=ROWS)
    parser.add_argument("--shapes", nargs="*", default=SHAPES, metavar="DEPTHxTOP_K")
    parser.add_argument("--only", nargs="+", default=(), metavar="NAME", help="these members")
    arguments = parser.parse_args()
    report = begin(__file__, __doc__, arguments)
    chain = load(arguments, room_for(arguments.contexts))
    bandwidth = measure_bandwidth(chain.engine.models.target.device)
    report.say(bandwidth.shown())
    settings = PassSettings(
        tuple(arguments.contexts),
        tuple(arguments.rows),
        tuple(arguments.shapes),
        arguments.repeats,
        arguments.turns,
        tuple(arguments.only),
    )
    report_passes(report, all_of(pass_cases(chain, settings, bandwidth)))
    report_drafts(report, all_of(draft_cases(chain, settings, bandwidth)))
    report.write(arguments.record)


if __name__ == "__main__":
    run(main)
