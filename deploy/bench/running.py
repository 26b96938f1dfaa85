"""Systems side by side on the same prompts: what a chain gains over its source target."""

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any

from polybasic.chain.base.processes.interruption import Interrupted
from polybasic.chain.base.progress import ProgressReport, tracked, waiting
from polybasic.chain.formats.card import record_results
from polybasic.chain.formats.files import write_json
from polybasic.chain.formats.plan import Plan
from polybasic.chain.kernels.product_times import name_of
from polybasic.deploy.bench.bench import Bench
from polybasic.deploy.bench.energy import EnergyMeter
from polybasic.deploy.bench.journal import Journal, JournalEntry
from polybasic.deploy.bench.noise import Quiet
from polybasic.deploy.bench.prompts import BenchPrompt, asked_prompts
from polybasic.deploy.bench.report.markdown import write_markdown
from polybasic.deploy.bench.report.page import write_page
from polybasic.deploy.bench.schema import Report
from polybasic.deploy.bench.summary import chain_digest, report_of, results_of
from polybasic.deploy.bench.systems.catalogue import (
    Systems,
    check_systems,
    own_systems,
    with_others,
)
from polybasic.deploy.bench.systems.system import System
from polybasic.deploy.planner.prompts import read_questions
from polybasic.deploy.planner.settings import BenchSettings
from polybasic.deploy.runtime.chain import Chain
from polybasic.deploy.runtime.hardware import (
    Usage,
    describe_hardware,
    device_named,
    forget_peak,
    usage,
)
from polybasic.deploy.runtime.load import load_chain
from polybasic.deploy.runtime.memory import Memory
from polybasic.deploy.runtime.rounds.sampling import Sampling

REPORT_FOLDER = "report"
"""Of a chain: where its report lies unless another folder is named."""
_PARTIAL_FOLDER = "partial"
_LONG = timedelta(minutes=15)
_PAUSE_SECONDS = 0.02
"""Before each answer: threads of the system before it spin for a while, then sleep."""


def bench_chain(
    folder: Path,
    settings: BenchSettings,
    say: Callable[[str], None] = lambda line: None,
    out: Path | None = None,
    command: str = "",
    prompts_named: str = "",
    target: str | None = None,
    lossy: Plan | None = None,
) -> Report:
    """Run the systems of `settings` in turns and write report.json, report.md and report.html.

    Each system of this runtime runs the plan that was measured as the best of its members on this
    machine, where there is one, else the chain's own tree and block length with these members.

    Turns are kept as they are answered: the same benchmark goes on where it was interrupted. Until
    then there is a report of its answers in the folder `partial` beside the others.

    Args:
        folder: a chain.
        settings: `prompts` names a file of prompts.
        say: called with lines for people.
        out: folder of the report. Without it the report lies in the chain, and its results are
            entered into the chain's manifest and card.
        command: that asked for it, for the report.
        prompts_named: what people call these prompts.
        target: as `load_chain`.
        lossy: a plan that runs beside the systems, as system `lossy`.

    Raises:
        UserError: the chain cannot be loaded, prompts that are malformed or all too long, systems
            without the target, over which speedups are counted, or one that the chain has no
            members for.
        KeyboardInterrupt: it was interrupted, and what was answered is kept.
    """
    check_systems(settings)
    if prompts_named:
        say(f"bench: prompts are {prompts_named}")
    questions = read_questions(Path(settings.prompts))
    device = device_named()
    forget_peak(device)
    before = usage(device)
    options = settings.model_dump(include={"dtype", "graphs", "tensor_parallel"})
    chain = load_chain(folder, **options, target=target, temperature=settings.temperature, say=say)
    loaded = usage(device)
    settings = settings.model_copy(update={"dtype": name_of(chain.engine.models.target.dtype)})
    own = own_systems(chain, settings, lossy)
    prompts, num_too_long = asked_prompts(chain, questions, settings)
    say("bench: every system answers once before the answers that count")
    began = time.monotonic()
    _warm_up(own, prompts, settings)
    warm_up_seconds = time.monotonic() - began
    memory = _memory_report(chain.memory, before, loaded, usage(device))
    with ExitStack() as stack:
        stack.callback(chain.close)
        systems = with_others(own, chain, settings, prompts, say, stack)
        began = time.monotonic()
        _warm_up([system for system in systems.running if system not in own], prompts, settings)
        warm_up_seconds += time.monotonic() - began
        into = out or folder / REPORT_FOLDER
        journal = _journal(into, chain, systems, settings, prompts)
        stack.callback(journal.close)
        bench = Bench(
            chain=chain,
            systems=systems,
            settings=settings,
            prompts=prompts,
            prompts_named=prompts_named,
            num_too_long=num_too_long,
            turns=journal.turns,
            quiet=Quiet(),
            meter=EnergyMeter(device),
            memory=memory,
            command=command,
        )
        num_left = settings.repeats * len(prompts) - len(journal.turns)
        most = timedelta(seconds=round(warm_up_seconds * num_left))
        shorter = "; --num-prompts-per-task asks fewer" if most > _LONG else ""
        say(f"bench: turns left to answer: {num_left}, in at most about {most}{shorter}")
        try:
            _run_in_turns(bench, journal, say)
        except KeyboardInterrupt as interruption:
            kept = _keep(bench, into / _PARTIAL_FOLDER)
            if isinstance(interruption, Interrupted):
                raise Interrupted(interruption.signal_number, kept) from None
            say(kept)
            raise
        say("bench: compares the answers and writes the report")
        report = report_of(bench)
    with waiting("writing the report"):
        _write(into, report)
    if out is None:
        record_results(folder, results_of(report))
    _forget(into / _PARTIAL_FOLDER)
    journal.path.unlink()
    return report


def _keep(bench: Bench, folder: Path) -> str:
    """Write a report of the turns so far into a folder; what is kept of them, for people."""
    num_all = bench.settings.repeats * len(bench.prompts)
    if not bench.turns:
        return f"none of {num_all} turns was over, and nothing is kept"
    _write(folder, report_of(bench, is_whole=False))
    return (
        f"{len(bench.turns)} of {num_all} turns are kept; wrote {folder / 'report.md'}; "
        "the same command goes on from there, as long as the plan is the same"
    )


def _write(folder: Path, report: Report) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "report.json", report.to_json(), indent=None)
    write_markdown(folder / "report.md", report)
    write_page(folder / "report.html", report)


def _forget(folder: Path) -> None:
    for name in ("report.json", "report.md", "report.html"):
        (folder / name).unlink(missing_ok=True)
    if folder.exists():
        folder.rmdir()


def _journal(
    folder: Path,
    chain: Chain,
    systems: Systems,
    settings: BenchSettings,
    prompts: Sequence[BenchPrompt],
) -> Journal:
    """Of the benchmark of which all of this is equal; others have journals of other names."""
    identity = {
        "chain": chain_digest(chain.manifest),
        "settings": settings.model_dump(mode="json", exclude={"prompts", "peers_python"}),
        "prompts": [prompt.described().sha256 for prompt in prompts],
        "systems": {
            system.name: [system.version, system.dtype, system.description]
            for system in systems.running
        },
        "plans": {system.name: system.plan.model_dump(mode="json") for system in systems.own},
        "hardware": describe_hardware(chain.engine.models.target.device),
    }
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    return Journal(folder / f"answers-{digest[:8]}.jsonl", identity)


def _warm_up(
    systems: Sequence[System], prompts: Sequence[BenchPrompt], settings: BenchSettings
) -> None:
    """Let each system answer the longest prompt, which is not counted."""
    longest = max(prompts, key=lambda prompt: len(prompt.token_ids))
    sampling = Sampling(settings.temperature, seed=settings.seed)
    for system in tracked(systems, "warm-up"):
        system.answer(longest.token_ids, settings.max_new_tokens, sampling)


def _run_in_turns(bench: Bench, journal: Journal, say: Callable[[str], None]) -> None:
    """Every system answers a prompt before the next one, so that drift affects all alike."""
    meter, systems, settings = bench.meter, bench.systems.running, bench.settings
    num_done, num_all = len(journal.turns), settings.repeats * len(bench.prompts)
    if num_done:
        say(f"bench: {num_done} of {num_all} turns are kept from before")
    with ProgressReport("bench", num_all, num_done) as progress:
        for repeat, place in product(range(settings.repeats), range(len(bench.prompts))):
            if (repeat, place) in journal.turns:
                continue
            # another one begins each time: no system always runs after the same one
            turn = {}
            for system in _rotated(systems, repeat + place):
                time.sleep(_PAUSE_SECONDS)
                before = meter.read()
                answer = system.answer(
                    bench.prompts[place].token_ids,
                    settings.max_new_tokens,
                    bench.sampling(repeat, place),
                )
                after = meter.read()
                joules = None if before is None or after is None else after - before
                answer = answer.until_stop(bench.chain.stop_tokens, settings.max_new_tokens)
                turn[system.name] = JournalEntry(answer, joules)
            journal.add(repeat, place, turn)
            progress.step()


def _rotated(systems: Sequence[System], number: int) -> Sequence[System]:
    first = number % len(systems)
    return [*systems[first:], *systems[:first]]


def _memory_report(
    stated: Memory, before: Usage | None, loaded: Usage | None, answered: Usage | None
) -> dict[str, Any]:
    """Bytes as stated, as measured if the system reports them, and the ratio of those that stay."""
    report: dict[str, Any] = {"stated": stated.to_json(), "measured": None, "ratio": None}
    if before is not None and loaded is not None and answered is not None:
        staying, peak = loaded.now - before.now, answered.peak - before.now
        report["measured"] = {"staying_bytes": staying, "peak_bytes": peak}
        report["ratio"] = staying / stated.staying_bytes
    return report
