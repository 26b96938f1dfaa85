"""A chain, loaded: text in, text out, with what it cost."""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import fields, replace
from functools import cached_property
from typing import Any, Self, Unpack, cast

from polybasic.chain.base.errors import UserError
from polybasic.chain.base.settings import arguments, unknown_argument
from polybasic.chain.formats.chat_templates import (
    RejectedMessages,
    prompt_token_ids,
    token_ids_of,
)
from polybasic.chain.formats.manifest import Manifest, check_plan
from polybasic.chain.formats.plan import MeasuredPlan, Plan, PlansByTemperature, PredictedPlan, Rule
from polybasic.chain.formats.verify import CheckedChain
from polybasic.deploy.runtime.drafters.history import History
from polybasic.deploy.runtime.engine import Engine
from polybasic.deploy.runtime.grammar import Grammar, Vocabulary
from polybasic.deploy.runtime.live import Generation, LiveAnswer
from polybasic.deploy.runtime.memory import Memory
from polybasic.deploy.runtime.options import Asked, Options
from polybasic.deploy.runtime.request import Answer, Piece, Request, Statistics
from polybasic.deploy.runtime.rounds.sampling import Sampling
from polybasic.deploy.runtime.rounds.stopping import AnswerText
from polybasic.deploy.runtime.sources import text_of, with_start
from polybasic.deploy.runtime.timeline import Timeline, timeline
from polybasic.deploy.runtime.tracing import Trace, TracedRound, traced

Messages = Sequence[dict[str, str]]
Prompt = str | Messages | list[int]
_SAMPLED = {field.name for field in fields(Sampling)}
_MAX_NEW_TOKENS = 256


class Chain:
    """A loaded chain; made by `load_chain`.

    Attributes:
        folder: where chain.json lies.
        manifest: its content.
        target_folder: where the target's checkpoint lies.
        member_folders: where each member's files lie, by name.
        plan: which members run by default, and how.
        measured_plan: where the plan comes from, if it was measured on this kind of machine.
        measured_plans: that and those of other temperatures, which answers at these run by.
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
        measured_plans: PlansByTemperature,
    ) -> None:
        self.folder, self.manifest = checked.folder, checked.manifest
        self.target_folder = checked.target
        self.member_folders = checked.members
        self.measured_plan = plan if isinstance(plan, MeasuredPlan) else None
        self.plan: Plan = plan.plan if isinstance(plan, MeasuredPlan) else plan
        self.measured_plans = measured_plans
        self.tokenizer, self.engine = tokenizer, engine
        self.stop_tokens, self.default_sampling = stop_tokens, default_sampling
        self.memory = memory
        if any(plan.by_load or plan.by_context or plan.early for plan in measured_plans.plans):
            engine.measured_plan = measured_plans.now

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the other processes of a chain that is divided; it answers nothing afterwards.

        Without it they end with this process, or when the chain is collected.
        """
        self.engine.models.close()

    def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Generation:
        """Answer a prompt, with the target's own distribution whatever members run.

        May be called from several threads: answers that are made at the same time share passes.

        Args:
            prompt: messages ({"role", "content"}); or a text, which is one user message where
                the tokenizer has a chat template and is continued as it is where it has none; or
                token ids, which are continued as they are.
            options: max_new_tokens, temperature, seed, stop, members and others: see `Options`.

        Raises:
            UserError: a setting out of range, members that cannot run, what does not fit the
                context, or too many answers at a time.
        """
        running = self.engine.begin(self._asked(prompt, **options), runs_ahead=True)
        pieces = list(self.engine.pieces_of(running))
        return Generation(
            "".join(piece.text for piece in pieces),
            [token for piece in pieces for token in piece.token_ids],
            running.statistics,
            [member for piece in pieces for member in piece.members],
            [logprob for piece in pieces for logprob in piece.logprobs],
            running.prompt_logprobs,
        )

    def trace(self, prompt: Prompt, **options: Unpack[Options]) -> Trace:
        """Answer a prompt as `generate`, and say of every round what was proposed and kept.

        No other answer can be made meanwhile, and captured graphs are not used.

        Args:
            prompt: as for `generate`.
            options: as for `generate`; without log-probabilities, which a trace has.

        Raises:
            UserError: as `generate`; answers are being made; the target is on another machine.
        """
        request = self._asked(prompt, **options)
        token_ids: list[int] = []
        rounds: list[TracedRound] = []
        for tokens, found in traced(self.engine, request):
            token_ids += tokens
            rounds += found
        assert request.text is not None, "a request of a prompt"
        text = request.text.take() + request.text.finish()
        return Trace(text, token_ids, request.token_ids, rounds)

    def timeline(self, prompt: Prompt, **options: Unpack[Options]) -> Timeline:
        """Answer a prompt as `generate`, and time all that the answer waits for; see `trace`."""
        return timeline(self.engine, self._asked(prompt, **options), self.memory)

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> Answer[Piece]:
        """As `generate`, a piece for each pass of the target, and `statistics` after the last.

        Options are checked before the first piece is asked for. From then on, until the stream
        has ended or is closed, it has a sequence of its own; it goes on when its next piece, or
        that of another stream, is asked for, and never more than a piece ahead.
        """
        return Answer(self._pieces(self._asked(prompt, **options)))

    def begin(self, prompt: Prompt, **options: Unpack[Options]) -> LiveAnswer:
        """As `stream`, for a server: the answer is run by `step`, and ahead of what is taken.

        Raises:
            BusyError: all sequences are used.
            UserError: as `generate`.
        """
        return LiveAnswer(self.engine.begin(self._asked(prompt, **options), runs_ahead=True))

    def step(self) -> bool:
        """Run one pass, for all answers that wait for it; False if none waits for any."""
        return self.engine.step()

    def stream_ids(
        self,
        token_ids: list[int],
        max_new_tokens: int,
        sampling: Sampling,
        plan: Plan | None = None,
        stop: str | Sequence[str] = (),
        follows_plans: bool = False,
    ) -> Answer[list[int]]:
        """Continue token ids; the new ones as the target confirms them, then `statistics`.

        Args:
            sampling: as it is, without the checkpoint's defaults.
            plan: default: the chain's for this temperature.
            follows_plans: whether those of load, context and length replace it between rounds.
        """
        arguments(Asked, {"stop": stop, "plan": plan})
        # Text costs time, and is made only to be searched.
        text = AnswerText(self.tokenizer.backend_tokenizer, stop) if stop else None
        plan = plan or self.plan_at(sampling.temperature)
        request = self._request(token_ids, max_new_tokens, sampling, plan, text, self.stop_tokens)
        return self.engine.run(self._following(request) if follows_plans else request)

    def sampling(self, **settings: Any) -> Sampling:
        """The checkpoint's default sampling with other settings, but for those that are None.

        Raises:
            UserError: a setting out of range.
        """
        given = {name: value for name, value in settings.items() if value is not None}
        return replace(self.default_sampling, **given)

    def plan_at(self, temperature: float) -> Plan:
        """What runs at a temperature by default: the plan of the nearest that was measured here."""
        measured = self.measured_plans.at(temperature)
        return self.plan if measured in (None, self.measured_plan) else measured.plan

    def plan_of(self, members: Sequence[str], temperature: float | None = None) -> Plan:
        """The best known plan in which exactly these members run, hence without n-grams; lossless.

        It was measured on this machine or packed with them, or else is the chain's plan with
        other members. Whether they can run is checked with each request.

        Args:
            temperature: that it is for; default: that of the chain's own plan.
        """
        chosen = tuple(members)
        measured = self.measured_plan
        own = self.plan
        if temperature is not None:
            measured, own = self.measured_plans.at(temperature), self.plan_at(temperature)
        chosen_here = [own, *(other.plan for other in _with_others(measured))]
        # Shapes that were chosen beside n-grams are the second best without them.
        chosen_here.sort(key=lambda plan: plan.ngram is not None)
        for plan in (*chosen_here, self.manifest.plan):
            if plan.members == chosen:
                return plan.model_copy(update={"ngram": None, "lossy": None})
        flush = {**self.manifest.plan.flush, **own.flush}
        update = {"members": chosen, "flush": flush, "ngram": None, "lossy": None}
        return own.model_copy(update=update)

    def predicted_seconds_per_token(self, plan: Plan) -> float | None:
        """What was expected of a plan when the chain's own was measured on this machine."""
        for measured in _with_others(self.measured_plan):
            if measured.plan == plan:
                return measured.seconds_per_token
        return None

    def encode(
        self,
        prompt: Prompt,
        takes_control_tokens: bool = True,
        continues: bool = False,
        template_options: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a prompt, by the tokenizer's own chat template; ids stay as they are.

        Args:
            prompt: a text, messages or token ids.
            takes_control_tokens: whether contents of messages may spell special tokens; if not,
                such text is text.
            continues: the answer goes on with the last message, which is the assistant's.
            template_options: what the template reads beside the messages: `enable_thinking`.

        Raises:
            UserError: messages without a chat template, or that the template refuses; nothing to
                go on with.
        """
        if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
            return cast(list[int], prompt)
        arguments(Asked, {"prompt": prompt})
        is_encoded = self.engine.models.encoder is not None
        if isinstance(prompt, str):
            if is_encoded or self.tokenizer.chat_template is None:
                return self.prompt_of(token_ids_of(self.tokenizer, prompt))
            prompt = [{"role": "user", "content": prompt}]
        if not is_encoded and self.tokenizer.chat_template is None:
            raise UserError(
                "no chat template",
                "the chain's tokenizer",
                "give a text, or package a target whose tokenizer has a template",
            )
        tokenizer, messages = self.tokenizer, list(cast(Messages, prompt))
        if continues and (messages[-1]["role"] != "assistant" or not messages[-1]["content"]):
            raise UserError(
                "no message to continue",
                f"the last one, of role {messages[-1]['role']}",
                "end with a message of the assistant that is not empty",
            )
        if is_encoded:
            begun = messages.pop()["content"] if continues else ""
            source = token_ids_of(tokenizer, text_of(messages))
            return self.prompt_of(source) + token_ids_of(tokenizer, begun, add_special_tokens=False)
        try:
            return prompt_token_ids(
                tokenizer, messages, takes_control_tokens, continues, template_options
            )
        except RejectedMessages as error:
            raise UserError(
                "chat template rejects the messages",
                f"the chain's tokenizer ({error})",
                "change the roles or their order",
            ) from error

    def prompt_of(self, token_ids: list[int]) -> list[int]:
        """The prompt of a text's token ids, without a chat template.

        Raises:
            UserError: they end an encoder's source.
        """
        encoder = self.engine.models.encoder
        return token_ids if encoder is None else with_start(token_ids, encoder)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The tokenizer as grammars read it, made when it is first asked for."""
        return Vocabulary(self.tokenizer, self.stop_tokens, self.engine.models.vocab_size)

    def _asked(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int | None = None,
        max_tokens: int | None = None,
        stop: str | Sequence[str] = (),
        members: Sequence[str] | None = None,
        plan: Plan | None = None,
        rule: Rule | None = None,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        stop_token_ids: Sequence[int] = (),
        ignore_eos: bool = False,
        grammar: Grammar | None = None,
        history: History | None = None,
        **settings: Any,
    ) -> Request:
        given: dict[str, Any] = {"stop": stop, "members": members, "plan": plan, "rule": rule}
        given |= {"logprobs": logprobs, "prompt_logprobs": prompt_logprobs}
        given |= {"stop_token_ids": stop_token_ids, "ignore_eos": ignore_eos, "grammar": grammar}
        given |= {"history": history}
        arguments(Asked, given)
        if unknown := settings.keys() - _SAMPLED:
            raise unknown_argument(min(unknown), Options.__annotations__)
        if max_new_tokens is not None and max_tokens is not None:
            raise UserError(
                "one setting by two names",
                f"max_new_tokens={max_new_tokens}, max_tokens={max_tokens}",
                "give one of them",
            )
        num_asked = max_tokens if max_new_tokens is None else max_new_tokens
        max_new_tokens = _MAX_NEW_TOKENS if num_asked is None else num_asked
        is_seeded = settings.get("seed") is not None or self.engine.models.remote is not None
        if history is not None and is_seeded and rule not in (None, "coupled"):
            raise UserError(
                "history and a seed do not go together by this rule",
                f"rule={rule!r}, by which drafts decide which numbers a token is drawn by",
                'leave one of them out, or use rule="coupled"',
            )
        if rule is None and plan is None and is_seeded:
            rule = "coupled"
        is_default = plan is None and members is None
        sampling = self.sampling(**settings)
        plan = self._plan_of(plan, members, sampling.temperature)
        if rule is not None:
            plan = plan.model_copy(update={"rule": rule})
        stop_tokens = frozenset(stop_token_ids) | (frozenset() if ignore_eos else self.stop_tokens)
        if sampling.min_tokens:
            sampling = replace(sampling, held_back=stop_tokens)
        text = AnswerText(self.tokenizer.backend_tokenizer, stop)
        token_ids = self.encode(prompt)
        request = self._request(token_ids, max_new_tokens, sampling, plan, text, stop_tokens)
        constraint = None
        if grammar is not None:
            if ignore_eos or sampling.min_tokens:
                given_too = "ignore_eos" if ignore_eos else f"min_tokens={sampling.min_tokens}"
                raise UserError("grammar whose end is not taken", given_too, "leave it out")
            constraint = self.vocabulary.constraint(
                grammar, len(token_ids), overwrites=logprobs is None
            )
        request = replace(
            self._following(request) if is_default else request,
            constraint=constraint,
            history=history,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            reuses=True,
        )
        self.engine.check(request)
        return request

    def _pieces(self, request: Request) -> Generator[Piece, None, Statistics]:
        return (yield from self.engine.pieces_of(self.engine.begin(request)))

    def _plan_of(
        self, plan: Plan | None, members: Sequence[str] | None, temperature: float
    ) -> Plan:
        """The plan that is asked for by itself, by its members or not at all."""
        if plan is None:
            usual = self.plan_at(temperature)
            if members is None or tuple(members) == usual.members:
                return usual
            return self.plan_of(members, temperature)
        if members is not None and tuple(members) != plan.members:
            raise UserError(
                "members differ from the plan's",
                f"{', '.join(members)} beside a plan of {', '.join(plan.members)}",
                "give one of the two",
            )
        return plan

    def _following(self, request: Request) -> Request:
        """By plans of the situation, if there are such and a seed's text does not depend on them.

        The drafter of its own plan observes while another one has none.
        """
        plan, is_greedy = request.plan, request.sampling.is_greedy
        if self.engine.measured_plan is None or not (is_greedy or plan.rule == "coupled"):
            return request
        drafter = plan.members[-1] if plan.members[-1] in self.engine.models.drafters else None
        return replace(request, follows_plans=True, kept_drafter=drafter)

    def _request(
        self,
        token_ids: list[int],
        max_new_tokens: int,
        sampling: Sampling,
        plan: Plan,
        text: AnswerText | None,
        stop_tokens: frozenset[int],
    ) -> Request:
        sampling.check_vocabulary(self.engine.models.vocab_size)
        plan = checked_plan(plan, self.manifest)
        check_draws(plan, sampling)
        if text is not None:
            # A special token has no text in which a stop string could be found.
            added = self.tokenizer.backend_tokenizer.get_added_tokens_decoder()
            stop_tokens |= {id for id, token in added.items() if token.content in text.stop}
        return Request(token_ids, max_new_tokens, sampling, stop_tokens, plan, text)


def _with_others(measured: MeasuredPlan | None) -> list[PredictedPlan]:
    """A plan with those of other members beside it."""
    return [measured, *measured.others] if measured is not None else []


def check_draws(plan: Plan, sampling: Sampling) -> None:
    """Check that a plan keeps what the draws promise: a law, or with a seed a text.

    Raises:
        UserError: it is lossy.
    """
    if plan.is_lossless:
        return
    if not sampling.is_greedy:
        where = f"temperature={sampling.temperature:g}"
        raise UserError("a lossy plan does not draw", where, "use temperature 0")
    if sampling.seed is not None:
        raise UserError(
            "a seed promises the target's text, which a lossy plan does not keep",
            f"seed={sampling.seed}",
            "leave it out",
        )


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
