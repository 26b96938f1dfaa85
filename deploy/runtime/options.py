"""What a chain can be asked for: the options of `polybasic.deploy.runtime.chain.Chain.generate`."""

from collections.abc import Mapping, Sequence
from typing import Annotated, TypedDict, get_args

from pydantic import ConfigDict, Field, InstanceOf

from polybasic.chain.formats.plan import Plan, Rule
from polybasic.chain.settings import Settings, Whole
from polybasic.deploy.runtime.drafters.history import History
from polybasic.deploy.runtime.grammar import Grammar
from polybasic.deploy.runtime.rounds.logprobs import MAX_LOGPROBS

_NumLogprobs = Annotated[Whole, Field(le=MAX_LOGPROBS)]


class Message(Settings):
    """One of a prompt; templates may read more than these."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: str
    content: str


class Asked(Settings):
    """What a request is asked for beside its sampling."""

    model_config = ConfigDict(strict=True)

    prompt: str | Annotated[Sequence[Message], Field(min_length=1)] = Field(
        "",
        description="one prompt: a text, or messages whose role and content are texts, at least "
        "one; several prompts are asked one by one",
    )
    stop: str | Sequence[str] = Field((), description="a text, or a list of texts")
    members: Sequence[str] | None = Field(None, description="names of members")
    plan: Plan | None = Field(None, description="a Plan")
    rule: Rule | None = Field(None, description=" or ".join(get_args(Rule)))
    logprobs: _NumLogprobs | None = Field(None, description=f"0 to {MAX_LOGPROBS}")
    prompt_logprobs: _NumLogprobs | None = Field(None, description=f"0 to {MAX_LOGPROBS}")
    stop_token_ids: Sequence[Whole] = Field((), description="token ids")
    ignore_eos: bool = Field(False, description="true or false")
    grammar: Grammar | None = Field(None, description="a Grammar")
    history: InstanceOf[History] | None = Field(None, description="a History")


class Options(TypedDict, total=False):
    """What may be set for `Chain.generate` and `Chain.stream`; None is the checkpoint's default.

    Attributes:
        max_new_tokens: of the answer at most; 256 by default. 0 with `prompt_logprobs` alone.
        max_tokens: the same, by the name that OpenAI's API has for it.
        min_tokens: of the answer, before which no token ends it.
        stop_token_ids: further ids that end the answer.
        ignore_eos: the checkpoint's own ids do not end the answer.
        logprobs: so many most probable tokens, 0 to 20, are named beside each token, all with their
            log-probabilities: the target's, before bias, penalties and temperature.
        prompt_logprobs: the same of the prompt's tokens.
        choice: which of several answers for one seed.
        grammar: that the answer matches as a whole, unless it is cut at `max_new_tokens`: JSON of
            a schema, say. The distribution is the target's under the grammar's masks.
        history: of earlier answers, from which plans with n-grams copy, too, and to which this one
            is added. Greedy answers and those with a seed stay the same; not with the rules
            "block" and "token" at a temperature, whose draws would be others.
        stop: strings that end the answer, which then ends before them.
        members: which members run, from the target down; by default the plan's.
        plan: run by this one and not by the chain's.
        seed: of the draws. With the rule "coupled" it means a text, the target's own sample for
            this seed, whichever members run; an answer's `statistics` say which one was drawn.
        rule: "coupled", "block" or "token", see `polybasic.chain.formats.plan.Plan`; by default
            that of `plan` where one is given, else "coupled" where a seed is given, else that of
            the chain's plan.

    The others are the settings of `polybasic.Sampling`, to be switched off by their neutral values:
    top_k=0, top_p=1, min_p=0, repetition_penalty=1.
    """

    max_new_tokens: int
    max_tokens: int
    min_tokens: int
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    logprobs: int | None
    prompt_logprobs: int | None
    choice: int
    grammar: Grammar | None
    history: History | None
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
