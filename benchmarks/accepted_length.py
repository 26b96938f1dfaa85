"""Tokens a round: what training foretells by simulation, and what the runtime serves.

    python benchmarks/accepted_length.py CHAIN --conversations FILE [--dtype float32] [--json FILE]

FILE is what the chain's recipe trained on; held-out prompts are split off as the recipe does it.
The same on both sides: these prompts, the target in one dtype and its greedy answers, the draft
tree, where rounds begin (behind an answer's first token, which is given with the prompt), the
length at which answers are cut and the tokens at which they stop. The simulation is the one that
chooses a head's weights. The runtime serves each prompt with the target right above the head and,
where the head drafts for an intermediate too, with that one between them; compared is the
innermost verifier's stage, whose passes the tree serves.

What remains: rounding, which may part a served answer from the simulated one where two tokens are
as good as equal, so the comparison is made over equal answers too; and the simulation takes an
intermediate to agree with the target. Answers of one token are left out.
"""

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from record import header, write_record
from rich.console import Console
from rich.progress import track
from rich.table import Table

from polybasic.chain.errors import UserError
from polybasic.chain.formats.config import read_config
from polybasic.chain.formats.manifest import HEAD_KINDS, Member
from polybasic.chain.formats.plan import Flush, Plan, Tree
from polybasic.chain.formats.tokenizer import load_tokenizer
from polybasic.chain.model.reference import load_reference_model
from polybasic.deploy import Chain, load_chain
from polybasic.deploy.rounds.sampling import Sampling
from polybasic.train.data.conversations import (
    fit_to_template,
    load_conversations,
    split_conversations,
)
from polybasic.train.features.states import Features
from polybasic.train.features.target import Target, checked_target
from polybasic.train.head.acceptance import (
    Acceptance,
    HeldoutBatch,
    TreeShape,
    heldout_batches,
    simulate,
)
from polybasic.train.head.eagle2 import DraftHead
from polybasic.train.head.start import new_head
from polybasic.train.settings import DataSettings, HeadSettings


@dataclass(frozen=True)
class Answer:
    """One served answer.

    Attributes:
        is_as_simulated: token for token the one that the simulation drafted for.
        lengths: tokens gained by each pass of the innermost verifier.
    """

    task: str
    is_as_simulated: bool
    lengths: list[int]


def trained_head(chain: Chain, name: str | None) -> Member:
    """The head of this name, or the first one, that drafts for the target.

    Raises:
        UserError: there is none.
    """
    target = chain.manifest.members[0].name
    heads = {
        member.name: member
        for member in chain.manifest.drafters
        if member.kind in HEAD_KINDS and target in member.drafts_for
    }
    if not heads or (name is not None and name not in heads):
        raise UserError(
            "no such head",
            f"{name or 'any'} that drafts for {target} in {chain.folder}",
            f"heads: {', '.join(heads) or 'none'}",
        )
    return heads[name or next(iter(heads))]


def load_for_training(chain: Chain) -> Target:
    """The chain's target as training loads it, in the dtype that the chain runs in."""
    running = chain.engine.models.target
    model = load_reference_model(chain.target_folder, running.dtype, running.device)
    tokenizer = load_tokenizer(chain.folder / chain.manifest.tokenizer.path, "chain's tokenizer")
    return checked_target(model, tokenizer, chain.target_folder)


def head_for_training(chain: Chain, head: Member, target: Target) -> DraftHead:
    """The chain's head as training runs it, in the target's dtype."""
    assert head.reference.path is not None  # a chain holds its heads itself
    folder = chain.folder / head.reference.path
    config = read_config(folder).head
    settings = HeadSettings(
        kind=config.kind,
        feature_layers=config.feature_layers or None,
        feature_loss_weight=float(config.kind == "eagle2"),
    )
    loaded = new_head(target.head_shape(settings), target.embedding, settings, 0, folder, None)
    running = chain.engine.models.target
    return loaded.to(device=running.device, dtype=running.dtype)


def heldout_answers(
    target: Target, drafts: DraftHead, data: DataSettings, answer_tokens: int
) -> list[HeldoutBatch]:
    """Held-out prompts with the target's greedy answers of two tokens and more."""
    rows = load_conversations(data.conversations, data.limit)
    _, heldout_rows = split_conversations(rows, data.num_heldout)
    heldout_rows = fit_to_template(heldout_rows, target.tokenizer)
    layers = drafts.shape.feature_layers
    batches = heldout_batches(target, heldout_rows, data.max_tokens, answer_tokens, layers)
    return rows_of(
        batches,
        [
            length > 1
            for batch in batches
            for length in (batch.lengths - batch.prompt_lengths).tolist()
        ],
    )


def data_settings(chain: Chain, conversations: str, num_heldout: int | None) -> DataSettings:
    """How the chain's recipe splits and cuts conversations."""
    of_recipe = chain.manifest.provenance.recipe.get("data", {})
    given = {} if num_heldout is None else {"num_heldout": num_heldout}
    return DataSettings(**{**of_recipe, "conversations": conversations, **given})


def plans(chain: Chain, head: Member, tree: Tree, flush_length: int | None) -> dict[str, Plan]:
    """Two members, and three where there is an intermediate between: what they are -> plan."""
    target, *below = (
        member.name for member in chain.manifest.verifying if member.name in head.drafts_for
    )
    found = {}
    for verifying in ([target], *([[target, below[0]]] if below else [])):
        plan = chain.plan_of([*verifying, head.name])
        flush = dict(plan.flush)
        if flush_length is not None:
            flush[target] = Flush(length=flush_length, rule=flush[target].rule)
        update = {"tree": tree, "flush": flush}
        found[", ".join(plan.members)] = plan.model_copy(update=update)
    return found


def serve(
    chain: Chain, plan: Plan, batches: Iterable[HeldoutBatch], answer_tokens: int
) -> list[Answer]:
    """The runtime's greedy answers to the prompts of `batches`, in their order.

    Args:
        answer_tokens: of an answer at most, its first one included, which is given.
    """
    innermost = plan.members[-2]
    answers = []
    for batch in batches:
        rows = zip(batch.token_ids, batch.prompt_lengths, batch.lengths, batch.tasks, strict=True)
        for token_ids, prompt_length, length, task in rows:
            begin = int(prompt_length) + 1
            prompt, num_tokens = token_ids[:begin].tolist(), answer_tokens - 1
            served = [
                token
                for tokens in chain.stream_ids(prompt, num_tokens, Sampling(0.0), plan)
                for token in tokens
            ]
            assert chain.last_statistics is not None
            answers.append(
                Answer(
                    task,
                    served == token_ids[begin:length].tolist(),
                    chain.last_statistics.accepted_lengths[innermost],
                )
            )
    return answers


def rows_of(batches: Iterable[HeldoutBatch], is_kept: Sequence[bool]) -> list[HeldoutBatch]:
    """The kept rows of all batches; a batch without any is left out."""
    kept, first = [], 0
    for batch in batches:
        end = first + len(batch.lengths)
        rows = [row for row, keep in enumerate(is_kept[first:end]) if keep]
        first = end
        if rows:
            features = Features(
                batch.features.states[rows],
                None if batch.features.layers is None else batch.features.layers[rows],
            )
            kept.append(
                HeldoutBatch(
                    batch.token_ids[rows],
                    features,
                    batch.prompt_lengths[rows],
                    batch.lengths[rows],
                    [batch.tasks[row] for row in rows],
                )
            )
    return kept


def pooled(answers: Sequence[Answer]) -> dict[str, Any]:
    """Tokens over rounds."""
    lengths = [length for answer in answers for length in answer.lengths]
    return {"accepted_length": sum(lengths) / len(lengths), "num_rounds": len(lengths)}


def compared(simulated: Acceptance, answers: Sequence[Answer]) -> dict[str, Any]:
    """What was served, in all and by task, and by how many percent it is above the simulation."""

    def beside(foretold: float, part: Sequence[Answer]) -> dict[str, Any]:
        found = pooled(part)
        percent = 100 * (found["accepted_length"] / foretold - 1)
        return {"simulated": foretold, **found, "difference_percent": percent}

    by_task = {
        task: beside(foretold, [answer for answer in answers if answer.task == task])
        for task, foretold in simulated.by_task.items()
    }
    whole = beside(simulated.accepted_length, answers)
    return {**whole, "num_simulated_rounds": simulated.num_rounds, "by_task": by_task}


def compare(
    chain: Chain,
    head: Member,
    batches: Sequence[HeldoutBatch],
    drafts: DraftHead,
    target: Target,
    found_plans: dict[str, Plan],
    answer_tokens: int,
) -> dict[str, Any]:
    """Each plan's served rounds beside the simulated ones: over all answers, and the equal ones."""
    served = {}
    for name, plan in found_plans.items():
        tree = TreeShape(plan.tree.depth, plan.tree.top_k, plan.tree.rows)
        shown = track(batches, description=name, console=Console(stderr=True))
        answers = serve(chain, plan, shown, answer_tokens)
        is_equal = [answer.is_as_simulated for answer in answers]
        equal = rows_of(batches, is_equal)
        served[name] = {
            "plan": plan.model_dump(mode="json"),
            "num_prompts": len(answers),
            "num_equal_answers": sum(is_equal),
            "all_answers": compared(simulate(drafts, target.lm_head, batches, tree), answers),
            "equal_answers": compared(
                simulate(drafts, target.lm_head, equal, tree),
                [answer for answer in answers if answer.is_as_simulated],
            )
            if equal
            else None,
        }
    return served


def print_served(name: str, one: dict[str, Any]) -> None:
    """A table by task, and a line on equal answers."""
    found, equal = one["all_answers"], one["equal_answers"]
    print(f"{name}: tokens a round of {one['plan']['members'][-2]}")
    table = Table("task")
    for column in ("simulated", "served", "difference", "rounds served"):
        table.add_column(column, justify="right")
    for task, part in (*found["by_task"].items(), ("all", found)):
        table.add_row(
            task,
            f"{part['simulated']:.2f}",
            f"{part['accepted_length']:.2f}",
            f"{part['difference_percent']:+.1f} %",
            str(part["num_rounds"]),
        )
    Console().print(table)
    line = (
        f"{found['num_simulated_rounds']} rounds simulated; {one['num_equal_answers']} of "
        f"{one['num_prompts']} served answers are the simulated ones"
    )
    if equal is not None:
        line += (
            f", over which {equal['simulated']:.2f} was simulated and "
            f"{equal['accepted_length']:.2f} served: {equal['difference_percent']:+.1f} %"
        )
    print(line + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("chain", type=Path)
    parser.add_argument("--conversations", required=True, help="as data.conversations")
    parser.add_argument("--head", help="a member; default: the first that drafts for the target")
    parser.add_argument("--num-heldout", type=int, help="default: as in the chain's recipe")
    parser.add_argument("--answer-tokens", type=int, default=96, help="of an answer at most")
    parser.add_argument("--dtype", help="default: as the target is stored")
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--top-k", type=int, default=4)
    parser.add_argument("--rows", type=int, default=24)
    parser.add_argument("--flush-length", type=int, help="of three members; default: the plan's")
    parser.add_argument("--json", type=Path, help="write the record here")
    arguments = parser.parse_args()
    chain = load_chain(arguments.chain, dtype=arguments.dtype)
    head = trained_head(chain, arguments.head)
    data = data_settings(chain, arguments.conversations, arguments.num_heldout)
    target = load_for_training(chain)
    drafts = head_for_training(chain, head, target)
    batches = heldout_answers(target, drafts, data, arguments.answer_tokens)
    tree = Tree(depth=arguments.depth, top_k=arguments.top_k, rows=arguments.rows)
    found_plans = plans(chain, head, tree, arguments.flush_length)
    served = compare(chain, head, batches, drafts, target, found_plans, arguments.answer_tokens)
    for name, one in served.items():
        print_served(name, one)
    running = chain.engine.models.target
    content = {
        "head": {"name": head.name, "kind": head.kind},
        "dtype": str(running.dtype).removeprefix("torch."),
        "tree": tree.model_dump(mode="json"),
        "answer_tokens": arguments.answer_tokens,
        "num_heldout": data.num_heldout,
        "served": served,
    }
    places = {arguments.chain: "CHAIN", arguments.conversations: "FILE", arguments.json: "RECORD"}
    write_record(arguments.json, header("accepted_length", running.device, places), content)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
