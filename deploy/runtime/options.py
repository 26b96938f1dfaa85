"""The options of `load_chain`, and those of `polybasic.deploy.runtime.chain.Chain.generate`."""

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, TypedDict, get_args

from pydantic import ConfigDict, Field, InstanceOf

from polybasic.chain.base.settings import Settings, Temperature, Whole
from polybasic.chain.formats.plan import Plan, Rule
from polybasic.deploy.runtime.drafters.history import History
from polybasic.deploy.runtime.grammar import Grammar
from polybasic.deploy.runtime.rounds.logprobs import MAX_LOGPROBS

MAX_SEQUENCES = 1024
"""That may be asked for."""
_NumLogprobs = Annotated[Whole, Field(le=MAX_LOGPROBS)]


class LoadOptions(Settings):
    """How a chain is loaded: the keyword arguments of `load_chain`.

    Attributes:
        device: default: cuda if there is one, else cpu.
        dtype: "bfloat16", "float16" or "float32"; default, also "auto": as the target is stored,
            or float32 where neither kernels nor PyTorch are fast in that.
        context_tokens: prompt and answer together; caches are allocated for this many. Default:
            what all members are declared for, at most 8192.
        plan: run by this one, not by the manifest's: the one that was measured on this kind of
            machine, or else the one that the chain was packed with.
        temperature: that the chain's own plan is taken for, where plans were measured at several;
            default: the checkpoint's own. An answer at another temperature runs by that one's plan.
        share_caches: False gives every verifying member a cache of its own.
        beyond_declared: more `context_tokens` than members are declared for are no error. What is
            answered after as many tokens means nothing; what it costs is right.
        graphs: on a GPU, capture CUDA graphs of passes and rounds, those of the plan at once; False
            launches every kernel by itself, with equal outputs.
        sequences: most answers at a time. Default: 16 on a CPU, and 1 on a GPU, where whole rounds
            are captured for one; with more each pass is. On a CPU caches take memory as they are
            filled, elsewhere each takes that of its whole context at once.
        cache_tokens: that the caches of all sequences hold together, on a CPU: when there are more,
            what is kept of answers that are over gives way, then the latest answers pause, and go
            on with the same text. Default: a whole context for each of `sequences`, as far as
            there is memory; where `sequences` is not given, half of what is free, of which answers
            that are over keep one context.
        reuses: what was read of an earlier answer's leading tokens is not read again. Default:
            where that changes no bit.
        target: the folder or hub id that the target is taken from, rather than from where the chain
            says; its files are compared with the chain's digests all the same.
        remote: HOST:PORT of a server of this chain's target (`polybasic serve-target`), whose
            weights are then neither needed nor loaded here.
        key_file: with the key that the server has.
        tls_certificate: that the server shows, or that of who signed it; without one messages are
            tagged with the key, but can be read on their way.
        optimistic: while the remote target works, the members here go on as if it agreed.
        tensor_parallel: processes that the verifying members are divided among, on a GPU each, or
            on the threads of this process. Under a launcher that has started as many commands they
            are these, else the others are started here and end with the chain.
        say: takes a line for people about what is captured; default: the log.
    """

    model_config = ConfigDict(strict=True)

    device: str | None = Field(None, description="cpu or cuda, or one GPU as in cuda:1")
    dtype: str | None = Field(None, description="auto or a dtype's name")
    context_tokens: int | None = Field(None, description="a number of tokens")
    plan: Plan | None = Field(None, description="a Plan")
    temperature: Temperature | None = Field(None, description="a temperature")
    share_caches: bool = Field(True, description="true or false")
    beyond_declared: bool = Field(False, description="true or false")
    graphs: bool = Field(True, description="true or false")
    sequences: int | None = Field(None, ge=1, le=MAX_SEQUENCES, description="a number of answers")
    cache_tokens: int | None = Field(None, ge=1, description="a number of tokens")
    reuses: bool | None = Field(None, description="true or false")
    target: str | None = Field(None, description="a folder, or a hub id org/name[@revision]")
    remote: str | None = Field(None, description="HOST:PORT")
    key_file: str | None = Field(None, description="the path of a file")
    tls_certificate: str | None = Field(None, description="the path of a file")
    optimistic: bool = Field(True, description="true or false")
    tensor_parallel: int = Field(1, ge=1, le=64, description="a number of processes, 1 to 64")
    say: Callable[[str], None] | None = Field(None, description="a function of a line")


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
