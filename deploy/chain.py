"""A chain, loaded: text in, text out, with what it cost."""

from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Annotated, Any, TypedDict, Unpack, get_args

from pydantic import ConfigDict, Field

from polybasic.chain.errors import UserError
from polybasic.chain.formats.chat_templates import (
    RejectedMessages,
    rendered_messages,
    token_ids_of,
)
from polybasic.chain.formats.manifest import Manifest, check_plan
from polybasic.chain.formats.plan import MeasuredPlan, Plan, PredictedPlan, Rule
from polybasic.chain.formats.verify import CheckedChain
from polybasic.chain.settings import Settings, arguments
from polybasic.deploy.engine import Engine
from polybasic.deploy.memory import Memory
from polybasic.deploy.request import Answer, Request, Statistics
from polybasic.deploy.rounds.sampling import Sampling
from polybasic.deploy.rounds.stopping import AnswerText

Messages = Sequence[dict[str, str]]


class _Message(Settings):
    """One of a prompt; templates may read more than these."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: str
    content: str


class _Asked(Settings):
    """What a request is asked for beside its sampling."""

    model_config = ConfigDict(strict=True)

    prompt: str | Annotated[Sequence[_Message], Field(min_length=1)] = Field(
        "", description="a text, or messages whose role and content are texts, at least one"
    )
    stop: str | Sequence[str] = Field((), description="a text, or a list of texts")
    members: Sequence[str] | None = Field(None, description="names of members")
    plan: Plan | None = Field(None, description="a Plan")
    rule: Rule | None = Field(None, description=" or ".join(get_args(Rule)))


class Options(TypedDict, total=False):
    """What may be set for `Chain.generate` and `Chain.stream`; None is the checkpoint's default.

    Attributes:
        max_new_tokens: of the answer at most; 256 by default.
        stop: strings that end the answer, which then ends before them.
        members: which members run, from the target down; by default the plan's.
        plan: run by this one and not by the chain's.
        seed: of the draws. With the rule "coupled" it means a text, the target's own sample for
            this seed, whichever members run; an answer's `statistics` say which one was drawn.
        rule: "coupled", "block" or "token", see `polybasic.chain.formats.plan.Plan`; by default
            that of `plan` where one is given, else "coupled" where a seed is given, else that of
            the chain's plan.

    The others are the settings of `polybasic.deploy.rounds.sampling.Sampling`, to be switched off
    by their neutral values: top_k=0, top_p=1, min_p=0, repetition_penalty=1.
    """

    max_new_tokens: int
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float] | None
    seed: int | None
    stop: str | Sequence[str]
    members: Sequence[str] | None
    plan: Plan | None
    rule: Rule | None


@dataclass(frozen=True)
class Generation:
    """A finished answer.

    Attributes:
        text: without special tokens, and without the stop string that ended it.
        token_ids: the new tokens, with the stop token or the tokens of the stop string.
        statistics: what it cost.
    """

    text: str
    token_ids: list[int]
    statistics: Statistics


@dataclass(frozen=True)
class Piece:
    """A part of an answer while it is made.

    `text` may be empty: in the middle of a character, or where a stop string may have begun. What
    was held back comes with a last piece, which has no tokens.
    """

    text: str
    token_ids: list[int]


class Chain:
    """A loaded chain; made by `load_chain`.

    Attributes:
        folder: where chain.json lies.
        manifest: its content.
        target_folder: where the target's checkpoint lies.
        plan: which members run by default, and how.
        measured_plan: where the plan comes from, if it was measured on this kind of machine.
        default_sampling: of the target's generation_config.json.
        stop_tokens: ids that end an answer.
        memory: that was stated before loading.
    """

    def __init__(
        self,
        checked: CheckedChain,
        tokenizer: Any,
        engine: Engine,
        plan: Plan | MeasuredPlan,
        stop_tokens: frozenset[int],
        default_sampling: Sampling,
        memory: Memory,
    ) -> None:
        self.folder, self.manifest = checked.folder, checked.manifest
        self.target_folder = checked.target
        self.measured_plan = plan if isinstance(plan, MeasuredPlan) else None
        self.plan: Plan = plan.plan if isinstance(plan, MeasuredPlan) else plan
        self.tokenizer, self.engine = tokenizer, engine
        self.stop_tokens, self.default_sampling = stop_tokens, default_sampling
        self.memory = memory

    def generate(self, prompt: str | Messages, **options: Unpack[Options]) -> Generation:
        """Answer a prompt, with the target's own distribution whatever members run.

        Args:
            prompt: messages ({"role", "content"}), or a text, which is one user message where
                the tokenizer has a chat template and is continued as it is where it has none.
            options: max_new_tokens, temperature, seed, stop, members and others: see `Options`.

        Raises:
            UserError: a setting out of range, members that cannot run, what does not fit the
                context, or another answer that is being generated.
        """
        answer = self.stream(prompt, **options)
        pieces = list(answer)
        return Generation(
            "".join(piece.text for piece in pieces),
            [token for piece in pieces for token in piece.token_ids],
            answer.statistics,
        )

    def stream(self, prompt: str | Messages, **options: Unpack[Options]) -> Answer[Piece]:
        """As `generate`, a piece for each pass of the target, and `statistics` after the last.

        Options are checked before the first piece is asked for. From then on, until the stream
        has ended or is closed, the chain gives no other answer.
        """
        text, request = self._asked(prompt, **options)
        return Answer(_pieces(text, self.engine.run(request)))

    def stream_ids(
        self,
        token_ids: list[int],
        max_new_tokens: int,
        sampling: Sampling,
        plan: Plan | None = None,
        stop: str | Sequence[str] = (),
    ) -> Answer[list[int]]:
        """Continue token ids; the new ones as the target confirms them, then `statistics`.

        Args:
            sampling: as it is, without the checkpoint's defaults.
            plan: default: the chain's.
        """
        arguments(_Asked, {"stop": stop, "plan": plan})
        # Text costs time, and is made only to be searched.
        text = AnswerText(self.tokenizer.backend_tokenizer, stop) if stop else None
        plan = plan or self.plan
        return self.engine.run(self._request(token_ids, max_new_tokens, sampling, plan, text))

    def sampling(self, **settings: Any) -> Sampling:
        """The checkpoint's default sampling with other settings, but for those that are None.

        Raises:
            UserError: a setting out of range.
        """
        given = {name: value for name, value in settings.items() if value is not None}
        return replace(self.default_sampling, **given)

    def plan_of(self, members: Sequence[str]) -> Plan:
        """The best known plan in which exactly these members run, hence without n-grams.

        It was measured on this machine or packed with them, or else is the chain's plan with
        other members. Whether they can run is checked with each request.
        """
        chosen = tuple(members)
        chosen_here = [self.plan, *(other.plan for other in self._measured_plans())]
        # Shapes that were chosen beside n-grams are the second best without them.
        chosen_here.sort(key=lambda plan: plan.ngram is not None)
        for plan in (*chosen_here, self.manifest.plan):
            if plan.members == chosen:
                return plan.model_copy(update={"ngram": None})
        flush = {**self.manifest.plan.flush, **self.plan.flush}
        update = {"members": chosen, "flush": flush, "ngram": None}
        return self.plan.model_copy(update=update)

    def predicted_seconds_per_token(self, plan: Plan) -> float | None:
        """What was expected of a plan when plans were measured on this kind of machine."""
        for measured in self._measured_plans():
            if measured.plan == plan:
                return measured.seconds_per_token
        return None

    def encode(self, prompt: str | Messages) -> list[int]:
        """Token ids of a prompt, by the tokenizer's own chat template.

        Raises:
            UserError: messages without a chat template, or that the template refuses.
        """
        arguments(_Asked, {"prompt": prompt})
        if isinstance(prompt, str):
            if self.tokenizer.chat_template is None:
                return token_ids_of(self.tokenizer, prompt)
            prompt = [{"role": "user", "content": prompt}]
        if self.tokenizer.chat_template is None:
            raise UserError(
                "no chat template",
                "the chain's tokenizer",
                "give a text, or package a target whose tokenizer has a template",
            )
        tokenizer, messages = self.tokenizer, list(prompt)
        try:
            text = rendered_messages(tokenizer, messages, add_generation_prompt=True)
        except RejectedMessages as error:
            raise UserError(
                "chat template rejects the messages",
                f"the chain's tokenizer ({error})",
                "change the roles or their order",
            ) from error
        return token_ids_of(tokenizer, text, add_special_tokens=False)

    def _asked(
        self,
        prompt: str | Messages,
        *,
        max_new_tokens: int = 256,
        stop: str | Sequence[str] = (),
        members: Sequence[str] | None = None,
        plan: Plan | None = None,
        rule: Rule | None = None,
        **settings: Any,
    ) -> tuple[AnswerText, Request]:
        arguments(_Asked, {"stop": stop, "members": members, "plan": plan, "rule": rule})
        if rule is None and plan is None and settings.get("seed") is not None:
            rule = "coupled"
        if plan is None:
            plan = self.plan
            if members is not None and tuple(members) != plan.members:
                plan = self.plan_of(members)
        elif members is not None and tuple(members) != plan.members:
            raise UserError(
                "members differ from the plan's",
                f"{', '.join(members)} beside a plan of {', '.join(plan.members)}",
                "give one of the two",
            )
        if rule is not None:
            plan = plan.model_copy(update={"rule": rule})
        text = AnswerText(self.tokenizer.backend_tokenizer, stop)
        sampling = self.sampling(**settings)
        return text, self._request(self.encode(prompt), max_new_tokens, sampling, plan, text)

    def _request(
        self,
        token_ids: list[int],
        max_new_tokens: int,
        sampling: Sampling,
        plan: Plan,
        text: AnswerText | None,
    ) -> Request:
        sampling.check_vocabulary(self.engine.models.target.config.vocab_size)
        plan, stop_tokens = checked_plan(plan, self.manifest), self.stop_tokens
        if text is not None:
            # A special token has no text in which a stop string could be found.
            added = self.tokenizer.backend_tokenizer.get_added_tokens_decoder()
            stop_tokens |= {id for id, token in added.items() if token.content in text.stop}
        return Request(token_ids, max_new_tokens, sampling, stop_tokens, plan, text)

    def _measured_plans(self) -> list[PredictedPlan]:
        measured = self.measured_plan
        return [measured, *measured.others] if measured is not None else []


def checked_plan(plan: Plan, manifest: Manifest) -> Plan:
    """A plan that a chain's members can run.

    Raises:
        UserError: they cannot.
    """
    try:
        check_plan(plan, manifest.members)
    except ValueError as error:
        names = ", ".join(member.name for member in manifest.members)
        raise UserError("plan cannot run", str(error), f"members: {names}") from error
    return plan


def _pieces(text: AnswerText, answer: Answer[list[int]]) -> Generator[Piece, None, Statistics]:
    with closing(answer):
        for new_tokens in answer:
            yield Piece(text.take(), new_tokens)
    if rest := text.finish():
        yield Piece(rest, [])
    return answer.statistics
