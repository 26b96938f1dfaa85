"""What report.json holds (schema polybasic.report/2), and nothing that it takes to make one.

Everything that a reader sees, as text, page or comparison, is derived from these models alone.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.files import read_json

SCHEMA: Literal["polybasic.report/2"] = "polybasic.report/2"

PerPrompt = list[list[float]]
"""[repeat][prompt]; a repeat that was interrupted has fewer prompts than the others."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


def _less(whole: PerPrompt, part: PerPrompt) -> PerPrompt:
    return [
        [value - taken for value, taken in zip(*rows, strict=True)]
        for rows in zip(whole, part, strict=True)
    ]


class Ratio(_Part):
    """How much faster one thing is than another: total tokens over total seconds, of both.

    Attributes:
        value: of the two rates.
        low: lower end of the 95 % interval, by bootstrap over questions within their tasks.
        high: its upper end.
        remedy: what would make known which of the two is faster; None where it is.
    """

    value: float
    low: float
    high: float
    remedy: str | None = None

    @property
    def is_conclusive(self) -> bool:
        return self.remedy is None


class Quantiles(_Part):
    """Of seconds, over answers."""

    median: float
    p95: float


class Lengths(_Part):
    """Tokens gained by passes of a verifying member.

    Attributes:
        counts: at [n], passes that gained n tokens.
        mean: over all passes; `low` and `high` bound its 95 % interval, by bootstrap as `Ratio`'s.
        variance: over passes.
    """

    counts: list[int]
    mean: float
    low: float
    high: float
    variance: float


class Totals(_Part):
    """Answers of a system, all or those of one task.

    Attributes:
        tokens: new ones, a stop token included; after it none counts.
        seconds: from prompt to last token.
        tokens_per_second: prefill included.
        decode_tokens_per_second: of the tokens after the first ones, over the time after these;
            None where answers have no more.
        first_token_seconds: from a prompt to its answer's first tokens.
        seconds_per_token: of the tokens after these.
        speedup: over `target`, prefill included.
        decode_speedup: the same of the decode rates.
        over_hf: over `hf_generate`, prefill included; None where it did not run.
        accepted_length: by passes of the target; None of a system of another runtime.
        joules_per_token: None where the machine does not tell.
    """

    num_answers: int
    tokens: int
    seconds: float
    tokens_per_second: float
    decode_tokens_per_second: float | None
    first_token_seconds: Quantiles
    seconds_per_token: Quantiles | None
    speedup: Ratio
    decode_speedup: Ratio | None
    over_hf: Ratio | None = None
    accepted_length: Lengths | None = None
    joules_per_token: float | None = None


class Answers(_Part):
    """What each answer took: the numbers that totals and intervals are made of.

    Attributes:
        num_tokens: new tokens.
        seconds: from prompt to last token.
        num_first: tokens that came first, together.
        first_seconds: until they were there.
        joules: of the machine meanwhile; None where it does not tell.
        passes: of the target; None of a system of another runtime.
        token_ids: new ones, [repeat][prompt][token], a stop token included.
        texts: of these, without special tokens, [repeat][prompt].
        accepted_lengths: by verifying member, tokens gained by each of its passes,
            [repeat][prompt][pass]; None of a system of another runtime.
    """

    num_tokens: PerPrompt
    seconds: PerPrompt
    num_first: PerPrompt
    first_seconds: PerPrompt
    joules: PerPrompt | None = None
    passes: PerPrompt | None = None
    token_ids: list[list[list[int]]] = []
    texts: list[list[str]] = []
    accepted_lengths: dict[str, list[list[list[int]]]] | None = None

    def after_first(self) -> tuple[PerPrompt, PerPrompt]:
        """Of each answer, the tokens after the first ones, and the seconds after these."""
        return (
            _less(self.num_tokens, self.num_first),
            _less(self.seconds, self.first_seconds),
        )


class MemberCost(_Part):
    """What a member of a plan did in all answers of one repeat, prefill excluded.

    Attributes:
        passes: forward passes.
        seconds: of them.
        accepted_length: of a verifying member.
        rows_per_token: rows that a verifying member read for each token that it gained.
        acceptance: of what this member proposed, at [i] the share of its drafts (trees, blocks)
            whose token at place i was accepted by the verifier above; empty where it proposes
            nothing.
    """

    passes: float
    seconds: float
    accepted_length: Lengths | None = None
    rows_per_token: float | None = None
    acceptance: list[float] = []


class Agreement(_Part):
    """Answers compared with the target's, token for token.

    Attributes:
        answers: compared.
        identical: of these.
        near_ties: others that part where two candidates' logits differ by less than `tolerance`.
        widest_near_tie: largest such difference.
        tolerance: logits that differ by less are indistinguishable in the dtype at hand.
        tokens_before_parting: median of the tokens that the others have in common with the
            target's; None where all are identical.
    """

    answers: int
    identical: int
    near_ties: int
    widest_near_tie: float
    tolerance: float
    tokens_before_parting: float | None = None

    @property
    def different(self) -> int:
        """Answers that rounding does not explain."""
        return self.answers - self.identical - self.near_ties


class Loss(_Part):
    """What a lossy plan gives up, and gains, beside lossless ones.

    Attributes:
        quality: share of its tokens that are the target's own, given all before them.
        answers: of these `identical` are the target's.
        over_plan: its rate over that of the chain's plan; None where that did not run.
    """

    quality: Ratio
    answers: int
    identical: int
    over_plan: Ratio | None = None


class LawCheck(_Part):
    """Whether sampled tokens have the target's distribution.

    Attributes:
        tokens: that were drawn and read again by the target.
        chi_square: of the tokens' places in the target's distribution, over `cells` equal parts.
        p_value: such a deviation or a larger one is as probable for draws from the target.
    """

    tokens: int
    cells: int
    chi_square: float
    p_value: float


class SystemReport(_Part):
    """One way of answering.

    Attributes:
        runtime: whose it is: "polybasic", "transformers" or a peer's name.
        version: of a peer, as it calls itself.
        description: what it is and was given, in a line.
        dtype: of its arithmetic.
        plan: that the chain ran, as chain.json writes plans; None of another runtime.
        shown_plan: the same in words.
        predicted_seconds_per_token: decode only, as `polybasic plan` predicted it.
        measured_seconds_per_token: decode only, the prefill taken off; of this runtime.
        totals: of all answers.
        tasks: by task group.
        groups: by group of prompts, where there are several; see `PromptReport.group`.
        answers: what each took.
        members: by name, in the plan's order; n-grams as "ngram".
        prefill_seconds: in all answers of one repeat.
        agreement: with the target's answers; None where it is not to be expected.
        law: of samples; None of greedy answers.
        loss: of a lossy plan; None of all others.
        notes: what a reader must know, a sentence each.
    """

    runtime: str
    version: str | None = None
    description: str
    dtype: str
    plan: dict[str, Any] | None = None
    shown_plan: str | None = None
    predicted_seconds_per_token: float | None = None
    measured_seconds_per_token: float | None = None
    totals: Totals
    tasks: dict[str, Totals]
    groups: dict[str, Totals] = {}
    answers: Answers
    members: dict[str, MemberCost] = {}
    prefill_seconds: float | None = None
    agreement: Agreement | None = None
    law: LawCheck | None = None
    loss: Loss | None = None
    notes: list[str] = []


class PromptReport(_Part):
    """One prompt: a turn of a question, after the earlier turns and their answers.

    Attributes:
        turn: 1 for the first.
        group: what else prompts are told apart by, as "new topics"; "" for none.
        num_tokens: up to where the answer begins.
        sha256: of its token ids, 16 hex digits: equal prompts of two reports are paired by it.
        token_ids: of the prompt, up to where the answer begins.
        text: of these.
    """

    question_id: str
    task: str
    turn: int
    group: str = ""
    num_tokens: int
    sha256: str
    token_ids: list[int] = []
    text: str = ""


class InsertionReport(_Part):
    """A verifying member inserted into a plan: Theorem 3.2 with measured values, as Table 1.

    Attributes:
        member: that was inserted.
        without: name of the system without it.
        within: name of the system with it.
        above_seconds: T_i, of a pass of the member above.
        new_seconds: T_new, of a pass of the inserted one.
        accepted: L_i, tokens a pass of the member above, without it.
        accepted_above_new: L_i_new, the same with it.
        accepted_new: L_new, tokens a pass of the inserted one.
        left: T_new / T_i.
        right: L_new (1 / L_i - 1 / L_i_new); the theorem expects a gain where left < right.
        speedup: measured, of the system with it over the one without, decode only.
    """

    member: str
    without: str
    within: str
    above_seconds: float
    new_seconds: float
    accepted: float
    accepted_above_new: float
    accepted_new: float
    left: float
    right: float
    speedup: Ratio

    @property
    def is_expected_to_pay(self) -> bool:
        return self.left < self.right


class NoiseReport(_Part):
    """How steady the machine was.

    Attributes:
        repeat_tokens_per_second: of `target`, by whole repeat: a trend is a drift.
        spread: the largest of these over the smallest, less 1.
        warnings: a sentence each, with what to do; empty where it was steady.
    """

    repeat_tokens_per_second: list[float]
    spread: float
    warnings: list[str] = []


class Report(_Part):
    """One benchmark of a chain.

    Attributes:
        complete: false where it was interrupted: then it holds what was answered until then.
        answered: turns that all systems answered, of `planned`.
        made: when it was written, in UTC, as ISO 8601.
        command: that made it, without machine paths where these can be left out.
        chain: name of its recipe.
        chain_digest: of its manifest's members and files.
        grown: shape whose costs a small chain was given; None of a chain of its own size.
        settings: as the recipe's section bench, with what was resolved: dtype, num_prompts,
            num_questions_left_out_as_too_long, prompts_sha256, prompts (named, not a path).
        plan: the chain's, with `shown`, predicted_ and measured_seconds_per_token, explanation.
        target: loss and right answers of a target that was trained with the chain, where a report
            says them; not shown, and not written.
        adaptations, draft_vocabulary, memory, rounding, hardware: as `polybasic.deploy` makes them.
        repeating: members of the plan that are copies of the target and can repeat the 4-bit
            codes of its file, so that what the chain gains makes no headline.
        notes: what a reader must know of the whole, a sentence each.
    """

    schema_: Annotated[Literal["polybasic.report/2"], Field(alias="schema")] = SCHEMA
    complete: bool
    answered: int
    planned: int
    made: str
    command: str
    chain: str
    chain_digest: str
    grown: str | None
    settings: dict[str, Any]
    hardware: dict[str, Any]
    versions: dict[str, str]
    prompts: list[PromptReport]
    systems: dict[str, SystemReport]
    insertions: list[InsertionReport]
    noise: NoiseReport
    plan: dict[str, Any]
    rounding: dict[str, Any]
    memory: dict[str, Any]
    target: dict[str, Any] | None = Field(None, exclude=True)
    adaptations: list[dict[str, Any]]
    draft_vocabulary: list[dict[str, Any]]
    repeating: list[str] = []
    notes: list[str] = []

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    def to_json(self) -> dict[str, Any]:
        """As report.json holds it."""
        return self.model_dump(mode="json", by_alias=True)

    def rows(self) -> list[dict[str, Any]]:
        """One for each answer: of each system, to each prompt, in each repeat.

        Returns:
            question_id, task, group, turn, prompt (text), system, repeat (from 0), text, token_ids,
            seconds, first_seconds, and accepted_lengths: by verifying member, tokens gained by each
            of its passes; {} of a system of another runtime.
        """
        return [
            {
                **prompt.model_dump(include={"question_id", "task", "group", "turn"}),
                "prompt": prompt.text,
                "system": name,
                "repeat": repeat,
                "text": answers.texts[repeat][place],
                "token_ids": answers.token_ids[repeat][place],
                "seconds": answers.seconds[repeat][place],
                "first_seconds": answers.first_seconds[repeat][place],
                "accepted_lengths": {
                    member: lengths[repeat][place]
                    for member, lengths in (answers.accepted_lengths or {}).items()
                },
            }
            for name, answers in ((name, system.answers) for name, system in self.systems.items())
            for repeat, texts in enumerate(answers.texts)
            for place, prompt in enumerate(self.prompts[: len(texts)])
        ]


def read_report(path: Path) -> Report:
    """Read a report.json.

    Raises:
        UserError: it is missing, no JSON, or of another schema.
    """
    content = read_json(path, "report")
    schema = content.get("schema") if isinstance(content, dict) else None
    if schema != SCHEMA:
        raise UserError(
            "report of another schema",
            f"{path} schema={schema!r}",
            f"measure again with polybasic bench, which writes {SCHEMA}",
        )
    try:
        return Report.model_validate(content)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        place = ".".join(map(str, fault["loc"]))
        raise UserError(
            "report is malformed",
            f"{path} {place}: {fault['msg']}",
            "measure again with polybasic bench",
        ) from error
