"""`polybasic chat`: a conversation with a chain in a terminal, or by lines of a pipe."""

import io
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polybasic.chain.base.errors import UserError
from polybasic.chain.base.processes.interruption import Interrupted, record_signals
from polybasic.chain.base.terminal import say
from polybasic.recipes.cli.chain import ChainArgument, note_bare
from polybasic.recipes.cli.shared.options import (
    ContextOption,
    DtypeOption,
    FrequencyPenaltyOption,
    KeyFileOption,
    MaxNewTokensOption,
    MembersOption,
    MinPOption,
    NoGraphsOption,
    PresencePenaltyOption,
    RemoteOption,
    RepetitionPenaltyOption,
    RuleOption,
    SeedOption,
    SmallOption,
    StopOption,
    TargetOption,
    TemperatureOption,
    TensorParallelOption,
    TlsCertificateOption,
    TopKOption,
    TopPOption,
    WaitOption,
    as_named,
    remote_options,
    with_small,
)
from polybasic.recipes.cli.shared.repeated import checked_rule
from polybasic.recipes.cli.shared.shown_answers import ShownAnswer, TintedAnswer

if TYPE_CHECKING:
    from polybasic.recipes.cli.shared.conversation import Conversation


def chat(
    chain: ChainArgument,
    small: SmallOption = None,
    system: Annotated[str, typer.Option(help="What the conversation begins with.")] = "",
    max_new_tokens: MaxNewTokensOption = 256,
    temperature: TemperatureOption = None,
    top_k: TopKOption = None,
    top_p: TopPOption = None,
    min_p: MinPOption = None,
    repetition_penalty: RepetitionPenaltyOption = None,
    presence_penalty: PresencePenaltyOption = None,
    frequency_penalty: FrequencyPenaltyOption = None,
    seed: SeedOption = None,
    rule: RuleOption = None,
    stop: StopOption = None,
    members: MembersOption = None,
    dtype: DtypeOption = None,
    context_tokens: ContextOption = None,
    no_graphs: NoGraphsOption = False,
    target: TargetOption = None,
    remote: RemoteOption = None,
    key_file: KeyFileOption = None,
    tls_certificate: TlsCertificateOption = None,
    no_optimism: WaitOption = False,
    tensor_parallel: TensorParallelOption = None,
    tint: Annotated[
        bool,
        typer.Option("--tint", help="In a terminal, show which member proposed each token."),
    ] = False,
) -> None:
    """Talk with a chain. Each line is a question, /help lists commands.

    Ctrl-C stops an answer, and leaves when pressed twice at the prompt, as Ctrl-D does. Where the
    input is no terminal, stdout gets the answers and nothing else.
    """
    from polybasic.deploy import load_chain
    from polybasic.deploy.runtime.rounds.sampling import Sampling
    from polybasic.recipes.cli.shared.conversation import Conversation

    settings: dict[str, Any] = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "seed": seed,
    }
    settings = {name: value for name, value in settings.items() if value is not None}
    Sampling(**settings)  # refused before anything is loaded
    options = {
        **settings,
        "max_new_tokens": max_new_tokens,
        "stop": stop or (),
        "members": members.split(",") if members is not None else None,
        "rule": checked_rule(rule, False),
    }
    loaded = load_chain(
        with_small(chain, small),
        dtype=dtype,
        context_tokens=context_tokens,
        graphs=not no_graphs,
        tensor_parallel=tensor_parallel,
        sequences=1,
        target=target,
        say=say,
        **remote_options(remote, key_file, tls_certificate, no_optimism),
    )
    note_bare(loaded, as_named(chain, small))
    if loaded.tokenizer.chat_template is None:
        raise UserError(
            "no chat template", f"the tokenizer of {chain}", "ask with polybasic generate"
        )
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # refused as a part of a question
    conversation = Conversation(loaded, options, system)
    conversation.check()
    is_tinted = tint and sys.stdout.isatty()
    show = partial(TintedAnswer, loaded) if is_tinted else ShownAnswer
    if sys.stdin.isatty():
        names = ", ".join(conversation.members or loaded.plan.members)
        say(f"{names}; /help lists commands, Ctrl-C stops an answer, Ctrl-D leaves")
        if is_tinted:
            TintedAnswer(loaded).explain()
        _talk(conversation, show)
    else:
        for line in sys.stdin:
            if not _take(line, conversation, show, lambda: False):
                break


def _talk(conversation: "Conversation", show: Callable[[], ShownAnswer]) -> None:
    """Lines of a terminal, until it is left."""
    with suppress(ImportError):
        import readline  # noqa: F401  lines can be edited, and found again
    is_leaving = False
    while True:
        try:
            if not sys.stdout.isatty():
                print("> ", end="", file=sys.stderr, flush=True)
            line = input("> " if sys.stdout.isatty() else "")
        except EOFError:
            say("")
            return
        except Interrupted:
            raise
        except KeyboardInterrupt:
            say("")
            if is_leaving:
                return
            is_leaving = True
            say("once more to leave")
            continue
        is_leaving, num_answers = False, len(conversation.costs)
        try:
            with record_signals(second_ends_at_once=True) as received:
                goes_on = _take(line, conversation, show, lambda: received.number != 0)
            if received.number == signal.SIGTERM:
                raise Interrupted(signal.SIGTERM, "the conversation is not kept")
            if received.number == signal.SIGINT:
                say("stopped")
            elif len(conversation.costs) > num_answers:
                cost = conversation.costs[-1]
                length = f"{cost.mean_accepted_length:.2f} tokens per target pass"
                say(f"({cost.tokens_per_second:.0f} tokens/s, {length})")
        except UserError as error:
            say(f"error: {error}")
            continue
        if not goes_on:
            return


def _take(
    line: str,
    conversation: "Conversation",
    show: Callable[[], ShownAnswer],
    is_stopped: Callable[[], bool],
) -> bool:
    """Answer a line, or do what it says; whether the conversation goes on."""
    from polybasic.recipes.cli.shared.conversation import run_command

    line = line.strip()
    if line.startswith("/") and not line.startswith("//"):
        return run_command(line, conversation)
    question = line.removeprefix("/")
    if not question:
        return True
    shown = show()
    try:
        for piece in conversation.answer(question, is_stopped):
            shown.write(piece)
    finally:
        shown.finish()
    return True
