"""Milliseconds a token after long contexts: the target alone, with drafts, with an intermediate.

    python benchmarks/contexts.py CHAIN [--contexts 1024 4096 16384] [--windows 1024]
        [--own-caches] [--max-new-tokens 32] [--turns 2] [--record FILE]

Systems are those of the chain, each again with sliding windows on all members below the target, and
the plan that was chosen for such a context, where there is one;
`--own-caches` measures intermediates with caches of their own in the place of shared ones. All
answers are greedy. The first round of an answer, and the prefill with it, is not counted: it is a
column of its own. A context is shipped prompts one after the other. Beyond the context that a
chain is declared for no text means anything: acceptance there is reported as it is.
"""

from collections.abc import Mapping, Sequence
from itertools import cycle, islice

from answering import Here
from command import ScriptReport, begin, load, options, positive, run
from end_to_end import HERE, SystemTimes, measure_end_to_end, speedup
from systems import QUESTIONS_PER_TASK, read_prompts, shown_plan, system_plans

from polybasic.chain.formats.checkpoints.config import read_config
from polybasic.chain.formats.plan import Plan, Window
from polybasic.deploy import Chain

CONTEXTS = (1024, 4096, 16384)
WINDOWS = (1024,)
BY_CONTEXT = "plan of the context"
"""What the chain does where nothing else is asked for."""
ROOM_TOKENS = 64
"""Of a context, for rounds that gain more than they must."""


def windowed_plans(chain: Chain, windows: Sequence[int]) -> dict[str, Plan]:
    """The systems of a chain, and each with windows of so many latest tokens."""
    plans = {}
    for name, plan in system_plans(chain).items():
        plans[name] = plan
        for tokens in windows if len(plan.members) > 1 else ():
            update = {"windows": dict.fromkeys(plan.members[1:], Window(tokens=tokens))}
            plans[f"{name}, window {tokens}"] = plan.model_copy(update=update)
    return plans


def long_texts(chain: Chain, contexts: Sequence[int]) -> dict[int, list[int]]:
    """A text of each length: shipped prompts one after the other, again and again where it is
    longer, and a whole one at the end."""
    last, *prompts = read_prompts(chain, None, QUESTIONS_PER_TASK, 1)
    before = cycle([token for prompt in prompts for token in prompt])
    return {num: [*islice(before, max(num - len(last), 0)), *last][:num] for num in contexts}


def cache_bytes(chain: Chain, plan: Plan, num_rows: int) -> int:
    """Of the first rows of all caches that a plan's members read."""
    drafter = chain.engine.drafters.of(plan)
    readers = [chain.engine.verifiers.get(name) for name in plan.members]
    caches = [reader.cache for reader in (*readers, drafter) if hasattr(reader, "cache")]
    distinct = {id(cache): cache for cache in caches}.values()
    return sum(layer[:, :num_rows].nbytes for cache in distinct for layer in cache.layers)


def report_context(
    report: ScriptReport,
    num_tokens: int,
    systems: Mapping[str, SystemTimes],
    caches: Mapping[str, int],
) -> None:
    """A row for each system."""
    alone, rows = systems["target"], []
    for name, system in systems.items():
        first = min(answer.first_seconds for turn in system.turns for answer in turn)
        rows.append(
            [
                name,
                f"{first:.2f}",
                *system.after_first.cells(),
                f"{speedup(alone.after_first, system.after_first).median:.2f}x",
                f"{caches[name] / 1e6:.1f}",
                f"{system.tokens_per_target_pass:.2f}",
                "yes" if system.num_identical(alone) else "no",
            ]
        )
    columns = ["system", "first round, s", "min", "median", "max", "speedup", "caches, MB"]
    title = f"Milliseconds a token after {num_tokens:,} tokens"
    report.table(title, [*columns, "tokens/pass", "as the target"], rows)


def main() -> None:
    names = ("chain", "--device", "--dtype", "--turns", "--max-new-tokens")
    parser = options(__doc__, *names, turns=2, max_new_tokens=32)
    parser.add_argument("--contexts", type=positive, nargs="+", default=CONTEXTS, metavar="TOKENS")
    parser.add_argument("--windows", type=positive, nargs="*", default=WINDOWS, metavar="TOKENS")
    parser.add_argument("--own-caches", action="store_true", help="share none")
    arguments = parser.parse_args()
    tokens, shares = arguments.max_new_tokens, not arguments.own_caches
    report = begin(__file__, __doc__, arguments)
    room = max(arguments.contexts) + tokens + ROOM_TOKENS
    chain = load(arguments, room, beyond_declared=True, share_caches=shares)
    chain.stop_tokens = frozenset()
    declared = read_config(chain.target_folder).decoder.context_tokens
    report.say(f"Declared for {declared:,} tokens, after which acceptance means nothing.")
    plans = windowed_plans(chain, arguments.windows)
    for name, plan in plans.items():
        report.say(f"{name}: {shown_plan(plan, chain)}")
    measured = chain.measured_plan
    for num_tokens, text in long_texts(chain, sorted(arguments.contexts)).items():
        if measured is not None and measured.by_context:
            plans[BY_CONTEXT] = plan = measured.now(1, num_tokens)
            report.say(f"{BY_CONTEXT}, {num_tokens:,} tokens: {shown_plan(plan, chain)}")
        answering = {HERE: dict.fromkeys(plans, Here(chain))}
        times = measure_end_to_end(answering, plans, [text], tokens, arguments.turns)
        caches = {name: cache_bytes(chain, plan, num_tokens) for name, plan in plans.items()}
        report_context(report, num_tokens, times[HERE], caches)
    report.write(arguments.record)


if __name__ == "__main__":
    run(main)
