"""A conversation with a chain, and what may be asked of it beside questions."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polybasic.chain.base.errors import UserError
from polybasic.chain.base.readable import counted
from polybasic.chain.base.terminal import say
from polybasic.chain.formats.card import shown_plan
from polybasic.chain.formats.files import write_json
from polybasic.recipes.cli.chain import statistics_line

if TYPE_CHECKING:
    from polybasic.deploy import Chain, Piece
    from polybasic.deploy.runtime.live import LiveAnswer
    from polybasic.deploy.runtime.request import Statistics

_NUMBERS: dict[str, type[int] | type[float]] = {
    "temperature": float,
    "top_k": int,
    "top_p": float,
    "min_p": float,
    "repetition_penalty": float,
    "presence_penalty": float,
    "frequency_penalty": float,
    "seed": int,
    "max_new_tokens": int,
}


@dataclass
class Conversation:
    """Questions, answers, and what these cost.

    Attributes:
        options: of `Chain.begin`, `max_new_tokens` among them.
        system: text that comes first; empty for none.
        is_target_alone: whether the target answers without the other members.
        turns: questions and answers by turns, as messages.
        num_forgotten: turns that are no longer read, because the context is full.
        costs: of the answers that were not stopped.
    """

    chain: "Chain"
    options: dict[str, Any]
    system: str = ""
    is_target_alone: bool = False
    turns: list[dict[str, str]] = field(default_factory=list)
    num_forgotten: int = 0
    costs: list["Statistics"] = field(default_factory=list)

    @property
    def members(self) -> list[str] | None:
        """That are asked to run; None for those of the chain's plan."""
        if self.is_target_alone:
            return [self.chain.manifest.members[0].name]
        members: list[str] | None = self.options["members"]
        return members

    def check(self) -> None:
        """Whether any question can be answered.

        Raises:
            UserError: members, settings or a system prompt with which none can be.
        """
        self._begin("Hello").close()

    def answer(self, question: str, is_stopped: Callable[[], bool]) -> Iterator["Piece"]:
        """The answer as it is made; once it ends or is stopped, a part of the conversation.

        Args:
            is_stopped: asked before each pass of a model.

        Raises:
            UserError: the question does not fit the context, a setting that cannot be applied, or
                a model that computes NaN. The question is then no part of the conversation.
        """
        live = self._begin(question)
        text, is_over = "", False
        try:
            while not is_over:
                is_over = is_stopped() or live.is_over
                for piece in live.take():
                    text += piece.text
                    yield piece
                if not is_over:
                    self.chain.step()
            if live.is_over:
                self.costs.append(live.statistics)
        finally:
            live.close()
        if text:
            self.turns += [_message("user", question), _message("assistant", text)]

    def _begin(self, question: str) -> "LiveAnswer":
        options = self.options | {"members": self.members}
        return self.chain.begin(self._fitting(question), **options)

    def _fitting(self, question: str) -> list[dict[str, str]]:
        """All that is to be read, without the oldest turns where the context has no room."""
        forgotten, room = self.num_forgotten, self.chain.engine.context_tokens
        while True:
            messages = [_message("system", self.system)] if self.system else []
            messages += [*self.turns[forgotten:], _message("user", question)]
            num_tokens = len(self.chain.encode(messages)) + self.options["max_new_tokens"]
            if num_tokens <= room or forgotten == len(self.turns):
                break
            forgotten += 2
        if num_tokens <= room and forgotten > self.num_forgotten:
            say(
                f"the context of {room:,} tokens is full: of {len(self.turns)} turns, the "
                f"{forgotten} oldest are no longer read"
            )
            self.num_forgotten = forgotten
        return messages


def run_command(line: str, conversation: Conversation) -> bool:
    """Do what a line that begins with a slash says; whether the conversation goes on.

    Raises:
        UserError: an unknown command, or one that cannot be done.
    """
    name, _, argument = line[1:].partition(" ")
    if name == "quit":
        return False
    if name not in _COMMANDS:
        raise UserError("unknown command", f"/{name}", "/help lists those that there are")
    act, _ = _COMMANDS[name]
    act(conversation, argument.strip())
    return True


def _stats(conversation: Conversation, _: str) -> None:
    costs = conversation.costs
    if not costs:
        say("no answer is complete yet")
        return
    say(f"last answer: {statistics_line(costs[-1])}")
    for members in dict.fromkeys(tuple(cost.forward_passes) for cost in costs):
        of_these = [cost for cost in costs if tuple(cost.forward_passes) == members]
        number = counted(len(of_these), "answer")
        say(f"{number} by {', '.join(members)}: {statistics_line(_sum(of_these))}")


def _sum(costs: list["Statistics"]) -> "Statistics":
    """What several answers cost together, as far as it is shown."""
    passes: Counter[str] = Counter()
    for cost in costs:
        passes.update(cost.forward_passes)
    return replace(
        costs[0],
        num_tokens=sum(cost.num_tokens for cost in costs),
        num_first=sum(cost.num_first for cost in costs),
        seconds=sum(cost.seconds for cost in costs),
        forward_passes=dict(passes),
        seed=None,
    )


def _target(conversation: Conversation, _: str) -> None:
    conversation.is_target_alone = not conversation.is_target_alone
    names = conversation.members or conversation.chain.plan.members
    say(f"answering: {', '.join(names)}{' alone' if conversation.is_target_alone else ''}")


def _plan(conversation: Conversation, _: str) -> None:
    chain, members = conversation.chain, conversation.members
    asked = conversation.options.get("temperature")
    temperature = chain.sampling(temperature=asked).temperature
    if members is not None:
        plan = chain.plan_of(members, temperature)
    else:
        of_temperature = chain.measured_plans.at(temperature)
        plan = chain.plan if of_temperature is None else of_temperature.now(1, 1)
    verifying = [member.name for member in chain.manifest.verifying]
    predicted = chain.predicted_seconds_per_token(plan)
    measured = f"; predicted {1000 * predicted:.2f} ms a token" if predicted else ""
    say(f"plan: {shown_plan(plan, verifying)}{measured}")


def _system(conversation: Conversation, text: str) -> None:
    conversation.system = text
    say("the system prompt is set" if text else "there is no system prompt")


def _set(conversation: Conversation, argument: str) -> None:
    name, _, given = argument.partition(" ")
    name, options = name.replace("-", "_"), conversation.options
    if not name:
        say(", ".join(f"{setting} {options.get(setting, 'default')}" for setting in _NUMBERS))
        return
    if name not in _NUMBERS:
        raise UserError("unknown setting", f"/set {argument}", f"use one of {', '.join(_NUMBERS)}")
    changed = {key: value for key, value in options.items() if key != name}
    try:
        if given or name == "max_new_tokens":
            changed[name] = _NUMBERS[name](given)
    except ValueError as error:
        raise UserError("not a number", f"/set {argument}", f"write /set {name} NUMBER") from error
    conversation.chain.sampling(
        **{setting: changed.get(setting) for setting in _NUMBERS if setting != "max_new_tokens"}
    )
    if changed["max_new_tokens"] < 1:
        raise UserError("value out of range", f"/set {argument}", "use 1 or more")
    conversation.options = changed
    say(f"{name} is {changed.get(name, 'by default')}")


def _reset(conversation: Conversation, _: str) -> None:
    conversation.turns, conversation.num_forgotten = [], 0
    say("the conversation begins anew")


def _save(conversation: Conversation, name: str) -> None:
    if not name:
        raise UserError("no file", "/save", "write /save FILE")
    senders = {"system": "system", "user": "human", "assistant": "gpt"}
    messages = [_message("system", conversation.system)] if conversation.system else []
    turns = [
        {"from": senders[message["role"]], "value": message["content"]}
        for message in [*messages, *conversation.turns]
    ]
    write_json(Path(name), [{"conversations": turns}])
    say(f"wrote {name}")


def _help(_: Conversation, __: str) -> None:
    for name, (_act, does) in _COMMANDS.items():
        say(f"/{name:<8} {does}")
    say("/quit     leaves, as Ctrl-D does; Ctrl-C stops an answer")
    say("//...     asks what begins with a slash")


_COMMANDS: dict[str, tuple[Callable[[Conversation, str], None], str]] = {
    "stats": (_stats, "what the last answer and all of them cost"),
    "target": (_target, "lets the target answer alone, or all members again"),
    "plan": (_plan, "shows how the members run"),
    "system": (_system, "TEXT sets the system prompt; without TEXT there is none"),
    "set": (_set, "NAME VALUE changes a setting, as in /set temperature 0.7; /set shows them"),
    "reset": (_reset, "forgets the conversation"),
    "save": (_save, "FILE writes the conversation, in the format that recipes read"),
    "help": (_help, "lists these commands"),
}


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}
