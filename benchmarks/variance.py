"""How much accepted lengths vary, by the way of verifying, beside Theorem 3.3 (docs/theory.md).

    python benchmarks/variance.py CHAIN [--prompts FILE] [--num-prompts 50] [--out DIR]

The paper's Figure 4. First target and intermediate alone, so that every block has the same length
and a pass gains 1 to n tokens, as the theorem wants it:

- `greedy`: temperature 0;
- `token`, `block`: temperature 1, speculative sampling by either rule;
- `matching`: temperature 1, a block's token counts only where the target draws the same one
  itself. Played along the texts of `block`: given the target's own token, an independent draw of
  the intermediate equals it with the probability that the intermediate gives to it.

Then the first three with all members, where blocks end with a round and vary in length; there is no
formula for these. Passes that the end of an answer could cut short are left out. Writes
variance.json and variance.svg.
"""

import argparse
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch

matplotlib.use("svg")
from matplotlib import pyplot
from record import header, write_record

from polybasic.chain.errors import UserError
from polybasic.chain.formats.files import whole_file
from polybasic.chain.formats.plan import Flush, Plan
from polybasic.deploy import Chain, load_chain
from polybasic.deploy.planner.theory import accepted_length_moments, estimate_acceptance
from polybasic.deploy.prompts import read_questions
from polybasic.deploy.rounds.sampling import Sampling
from polybasic.recipes.embedded.conversations import COMPOSERS, write_prompts

SAMPLED = {"greedy": (0.0, "block"), "token": (1.0, "token"), "block": (1.0, "block")}
"""System -> temperature and rule; at temperature 0 both rules are one."""
MIN_PASSES = 2
"""Of a prompt, for it to have a variance."""


@dataclass
class System:
    """Accepted lengths of the target, whole blocks only, by prompt."""

    lengths: list[list[int]] = field(default_factory=list)

    def summary(self, max_tokens: int | None) -> dict[str, Any]:
        """Pooled and by prompt; with the theorem's moments where a pass gains 1 to `max_tokens`."""
        pooled = [length for lengths in self.lengths for length in lengths]
        if len(pooled) < MIN_PASSES:
            raise UserError(
                "answers too short",
                f"{len(pooled)} passes over whole blocks",
                "raise --max-new-tokens or shorten --flush-length",
            )
        result: dict[str, Any] = {
            "num_passes": len(pooled),
            "mean": statistics.fmean(pooled),
            "variance": statistics.variance(pooled),
            "by_prompt": [
                {
                    "num_passes": len(lengths),
                    "mean": statistics.fmean(lengths),
                    "variance": statistics.variance(lengths),
                }
                for lengths in self.lengths
                if len(lengths) >= MIN_PASSES
            ],
        }
        if max_tokens is not None:
            result["acceptance"] = estimate_acceptance(pooled, max_tokens)
            moments = accepted_length_moments(result["acceptance"], max_tokens)
            result["formula_mean"], result["formula_variance"] = moments
        return result


def run_system(
    chain: Chain, prompts: list[list[int]], plan: Plan, sampling: Sampling, max_new_tokens: int
) -> tuple[System, list[list[int]]]:
    """Accepted lengths and answers."""
    system, answers = System(), []
    longest_round = plan.tree.depth + 1 if plan.members[-1] in chain.engine.models.drafters else 1
    # A stage collects less than its flush length and one round of the stage below it.
    longest_pass = longest_round + sum(flush.length for flush in plan.flush.values())
    for index, prompt in enumerate(prompts):
        seed = None if sampling.seed is None else sampling.seed + index
        drawn = Sampling(temperature=sampling.temperature, seed=seed)
        answers.append(
            [t for batch in chain.stream_ids(prompt, max_new_tokens, drawn, plan) for t in batch]
        )
        assert chain.last_statistics is not None
        lengths = chain.last_statistics.accepted_lengths[plan.members[0]]
        if chain.last_statistics.stopped_by != "length":
            lengths = lengths[:-1]
        begins = np.cumsum([0, *lengths])
        system.lengths.append(
            [
                length
                for begin, length in zip(begins, lengths, strict=False)
                if max_new_tokens - begin >= longest_pass
            ]
        )
    return system, answers


def match(
    chain: Chain, names: tuple[str, str], texts: Iterator[tuple[list[int], list[int]]], block: int
) -> System:
    """What blocks of `block` tokens gain along (prompt, answer) where only equal draws count.

    The intermediate reads each block behind the target's own rows, as in a chain.
    """
    target, proposer = (chain.engine.verifiers[name] for name in names)
    uniforms, system = random.Random(0), System()
    for prompt, answer in texts:
        sequence, position = prompt + answer, len(prompt)
        lengths: list[int] = []
        for verifier in (proposer, target):
            verifier.cache.truncate(0)
            if position > 1:
                verifier.read(sequence[: position - 1])
                verifier.cache.keep(range(position - 1))
        while position + block < len(sequence):
            # Target and proposer may share a cache: the target's rows are written last.
            proposer.cache.truncate(position - 1)
            states = proposer.read(sequence[position - 1 : position - 1 + block])
            rows = proposer.logits(states).float().softmax(-1)
            tokens = sequence[position : position + block]
            probabilities = rows[list(range(block)), tokens].tolist()
            kept = 0
            while kept < block and uniforms.random() < probabilities[kept]:
                kept += 1
            proposer.cache.keep(range(kept + 1))
            target.cache.truncate(position - 1)
            target.read(sequence[position - 1 : position + kept])
            target.cache.keep(range(kept + 1))
            lengths.append(kept + 1)
            position += kept + 1
        system.lengths.append(lengths)
    return system


def plan_with(members: tuple[str, ...], chain: Chain, length: int, rule: Any) -> Plan:
    """Fixed flush length and rule for every stage that collects."""
    verifying = [name for name in members if name in chain.engine.verifiers]
    flush = {name: Flush(length=length, rule=rule) for name in verifying[:-1]}
    return Plan(members=members, tree=chain.manifest.plan.tree, flush=flush)


def all_members(chain: Chain) -> tuple[str, ...]:
    """Every verifying member, and the first drafter for the innermost."""
    verifying = tuple(member.name for member in chain.manifest.verifying)
    for drafter in chain.manifest.drafters:
        if verifying[-1] in drafter.drafts_for:
            return (*verifying, drafter.name)
    raise UserError("nothing drafts", f"for {verifying[-1]}", "use a chain with a drafter for it")


def read_prompts(chain: Chain, path: Path | None, num: int) -> list[list[int]]:
    """First turns, spread evenly over the file; without one, held-out embedded prompts."""
    if path is None:
        with tempfile.TemporaryDirectory() as folder:
            written = Path(folder) / "prompts.jsonl"
            write_prompts(written, num_per_task=-(-num // len(COMPOSERS)), seed=0)
            questions = read_questions(written)
    else:
        questions = read_questions(path)
    num = min(num, len(questions))
    return [chain.encode(questions[i * len(questions) // num].turns[0]) for i in range(num)]


def print_table(title: str, summaries: dict[str, dict[str, Any]]) -> None:
    print(f"\n{title}")
    print("| system | passes | mean | formula | variance | formula | acceptance |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    columns = ("mean", "formula_mean", "variance", "formula_variance", "acceptance")
    for name, summary in summaries.items():
        cells = [f"{summary[key]:.3f}" if key in summary else "" for key in columns]
        print(f"| {name} | {summary['num_passes']} | {' | '.join(cells)} |")


def draw(path: Path, summaries: dict[str, dict[str, Any]], max_tokens: int) -> None:
    """A panel for each system: prompts, all of them together, and the formula's curve."""
    pyplot.rcParams |= {"svg.hashsalt": "polybasic", "font.size": 10}
    figure, panels = pyplot.subplots(
        2, 2, figsize=(7, 5.6), sharex=True, sharey=True, layout="constrained"
    )
    curve = [accepted_length_moments(a, max_tokens) for a in np.linspace(0, 1, 201).tolist()]
    for axes, (name, summary) in zip(panels.flat, summaries.items(), strict=True):
        prompts = summary["by_prompt"]
        axes.plot(
            *zip(*curve, strict=True), color="black", linewidth=1, label="Theorem 3.3, corrected"
        )
        axes.scatter(
            [one["mean"] for one in prompts],
            [one["variance"] for one in prompts],
            s=16,
            facecolors="none",
            edgecolors="#2f78b8",
            label="a prompt",
        )
        axes.scatter(
            summary["mean"],
            summary["variance"],
            marker="D",
            s=36,
            color="#d95f02",
            zorder=3,
            label="all passes",
        )
        axes.set_title(name, fontsize=11)
    figure.supxlabel("mean accepted length (tokens a target pass)", fontsize=10)
    figure.supylabel("variance (tokens²)", fontsize=10)
    handles, labels = panels.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=3, frameon=False)
    with whole_file(path) as partial:
        figure.savefig(partial, format="svg", metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("chain", type=Path)
    parser.add_argument("--prompts", type=Path, help="Spec-Bench's question format")
    parser.add_argument("--num-prompts", type=int, default=50)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--flush-length", type=int, default=8)
    parser.add_argument("--dtype")
    parser.add_argument("--out", type=Path, default=Path("runs/variance"))
    arguments = parser.parse_args()
    chain = load_chain(arguments.chain, dtype=arguments.dtype)
    names = tuple(member.name for member in chain.manifest.verifying)[:2]
    if len(names) < 2:
        raise UserError("no intermediate", str(arguments.chain), "use a chain that has one")
    prompts = read_prompts(chain, arguments.prompts, arguments.num_prompts)
    length, max_tokens = arguments.flush_length, arguments.flush_length + 1
    tables: dict[str, dict[str, dict[str, Any]]] = {"fixed_blocks": {}, "all_members": {}}
    texts: list[list[int]] = []
    for table, members in (("fixed_blocks", names), ("all_members", all_members(chain))):
        for system, (temperature, rule) in SAMPLED.items():
            print(f"{table} {system}", file=sys.stderr)
            plan = plan_with(members, chain, length, rule)
            sampling = Sampling(temperature=temperature, seed=0)
            found, answers = run_system(chain, prompts, plan, sampling, arguments.max_new_tokens)
            is_fixed = table == "fixed_blocks"
            tables[table][system] = found.summary(max_tokens if is_fixed else None)
            if is_fixed and system == "block":
                texts = answers
    with torch.inference_mode():
        matched = match(chain, names, zip(prompts, texts, strict=True), length)
    tables["fixed_blocks"]["matching"] = matched.summary(max_tokens)
    print_table(f"{', '.join(names)}: blocks of {length} tokens", tables["fixed_blocks"])
    print_table(f"{', '.join(all_members(chain))}: rounds to {length}", tables["all_members"])
    places = {arguments.chain: "CHAIN", arguments.prompts: "PROMPTS", arguments.out: "DIR"}
    head = header("variance", chain.engine.models.target.device, places)
    content = {
        "num_prompts": len(prompts),
        "max_new_tokens": arguments.max_new_tokens,
        "flush_length": length,
        **tables,
    }
    write_record(arguments.out / "variance.json", head, content)
    draw(arguments.out / "variance.svg", tables["fixed_blocks"], max_tokens)
    print(f"wrote {arguments.out / 'variance.svg'}", file=sys.stderr)


if __name__ == "__main__":
    main()
