"""What caches that fill by need give: memory of many sequences, second turns of conversations.

    python benchmarks/caches.py CHAIN [--context-tokens N] [--sequences N] [--tokens N]
        [--conversations N] [--beginning N] [--dtype bfloat16] [--record FILE]

Many sequences of `--tokens` each, at a limit of `--context-tokens`, are answered at a time, and
what the process takes more than before is printed beside what caches of whole contexts would; and
as many that have their first `--beginning` tokens in common, once one of them is answered. Then
conversations of `--beginning` tokens, the first 64 of which are the same, as of a system prompt,
take turns: each is asked once, then each again with what is new. No token ends an answer. Texts are
questions one after the other.
"""

import time
from pathlib import Path
from statistics import median

from command import ScriptReport, begin, load, options, positive, run
from systems import prompts_of_length

from polybasic.chain.base.errors import UserError
from polybasic.deploy import Chain

NUM_NEW = 32
"""Tokens of an answer, and of what a second turn adds to it."""
NUM_COMMON = 64
"""That all conversations begin with."""
_PAGES = Path("/proc/self/smaps_rollup")


def in_use() -> int:
    """Bytes of this process, those of pages that it has mapped several times once.

    Raises:
        UserError: the system does not tell.
    """
    if not _PAGES.exists():
        raise UserError("memory in use is not known", "of this system", "run it on Linux")
    lines = _PAGES.read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def forget(chain: Chain) -> None:
    """Empty all caches."""
    for slot in chain.engine.slots.made:
        slot.drop()


def report_memory(
    report: ScriptReport,
    chain: Chain,
    prompts: list[list[int]],
    num_tokens: int,
    num_common: int = 0,
) -> None:
    """What the caches of all sequences take at a time, of which some tokens may be the same."""
    num = len(prompts)
    chain.generate(prompts[0][:NUM_NEW], max_new_tokens=NUM_NEW)
    forget(chain)
    before, live = in_use(), []
    for place, text in enumerate(prompts):
        live.append(chain.begin(text, max_new_tokens=NUM_NEW, ignore_eos=True))
        while num_common and not place and chain.step():
            pass
    while chain.step():
        pass
    taken = in_use() - before
    paused = sum(answering.statistics.num_pauses for answering in live)
    whole = num * chain.memory.context_tokens * chain.memory.token_bytes
    row = [f"{num} x {num_tokens}", f"{taken / 1e6:.0f}", f"{whole / 1e6:,.0f}", str(paused)]
    columns = ["sequences x tokens", "taken, MB", "of whole contexts, MB", "pauses"]
    which = f"that have {num_common:,} tokens in common, " if num_common else ""
    limit = f"at a limit of {chain.memory.context_tokens:,} tokens"
    report.table(f"Caches of sequences {which}{limit}", columns, [row])


def report_turns(report: ScriptReport, chain: Chain, talks: list[list[int]]) -> None:
    """Seconds until the first token, of conversations that take turns."""
    seconds: list[list[float]] = []
    cached: list[list[int]] = []
    num_tokens = len(talks[0])
    talks = [[*talks[0][:NUM_COMMON], *talk[NUM_COMMON:]] for talk in talks]
    for _ in range(2):
        seconds.append([])
        cached.append([])
        for place, talk in enumerate(talks):
            began = time.perf_counter()
            stream = chain.stream(talk, max_new_tokens=NUM_NEW, ignore_eos=True)
            tokens = [*next(stream).token_ids]
            seconds[-1].append(time.perf_counter() - began)
            tokens += [token for piece in stream for token in piece.token_ids]
            cached[-1].append(stream.statistics.num_cached_tokens)
            talks[place] = [*talk, *tokens, *talk[:NUM_NEW]]
    ratios = [second / first for first, second in zip(*seconds, strict=True)]
    rows = [
        ["first", f"{median(seconds[0]):.3f}", "1", f"{median(cached[0]):.0f}"],
        [
            "second",
            f"{median(seconds[1]):.3f}",
            f"{median(ratios):.3f}",
            f"{median(cached[1]):.0f}",
        ],
    ]
    columns = ["turn", "first token, s", "over the first turn's", "tokens not read again"]
    report.table(f"{len(talks)} conversations that begin with {num_tokens:,} tokens", columns, rows)


def main() -> None:
    parser = options(__doc__, "chain", "--dtype", "--prompts")
    parser.add_argument("--context-tokens", type=positive, default=8192)
    parser.add_argument("--sequences", type=positive, default=16)
    parser.add_argument("--tokens", type=positive, default=500)
    parser.add_argument("--conversations", type=positive, default=3)
    parser.add_argument("--beginning", type=positive, default=4000)
    arguments = parser.parse_args()
    if arguments.tokens <= NUM_NEW:
        raise UserError(
            "too few tokens", f"--tokens {arguments.tokens}", f"use more than {NUM_NEW}"
        )
    report = begin(__file__, __doc__, arguments)
    chain = load(arguments, arguments.context_tokens, sequences=arguments.sequences)

    def texts(num: int, num_tokens: int) -> list[list[int]]:
        return prompts_of_length(chain, arguments.prompts, num_tokens, num, 2 * NUM_NEW)

    each = texts(arguments.sequences, arguments.tokens - NUM_NEW)
    report_memory(report, chain, each, arguments.tokens)
    [common] = texts(1, arguments.beginning)
    alike = [[*common, *text[:NUM_NEW]] for text in each]
    num_tokens = arguments.beginning + 2 * NUM_NEW
    report_memory(report, chain, alike, num_tokens, arguments.beginning)
    forget(chain)
    report_turns(report, chain, texts(arguments.conversations, arguments.beginning))
    report.write(arguments.record)


if __name__ == "__main__":
    run(main)
