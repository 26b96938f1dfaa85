"""A chain, loaded: text in, text out, with what it cost."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypedDict, Unpack

import jinja2
import torch

from polybasic.chain.errors import UserError
from polybasic.chain.formats.checkpoint import resolve_chain
from polybasic.chain.formats.config import read_decoder_config, read_head_config, stored_dtype
from polybasic.chain.formats.files import read_json
from polybasic.chain.formats.manifest import (
    HEAD_KINDS,
    MeasuredPlan,
    Plan,
    PredictedPlan,
    check_plan,
)
from polybasic.chain.formats.tokenizer import load_tokenizer
from polybasic.chain.formats.verify import CheckedChain, check_chain
from polybasic.chain.kernels.cpu.library import kernels_for
from polybasic.chain.kernels.selection import reads_4_bits
from polybasic.chain.model.decoder import Decoder
from polybasic.chain.model.head import EagleHead
from polybasic.chain.model.linear import is_laid_out_anew
from polybasic.chain.model.loading import load_decoder, load_head
from polybasic.deploy.defaults import read_default_sampling, read_stop_tokens
from polybasic.deploy.engine import (
    CONTEXT_TOKENS_BY_DEFAULT,
    Engine,
    Models,
    Request,
    Statistics,
)
from polybasic.deploy.hardware import available_bytes, hardware_name, release_unused
from polybasic.deploy.memory import Kernels, Layout, Memory, state_memory
from polybasic.deploy.rounds.sampling import Sampling
from polybasic.deploy.rounds.stopping import AnswerText
from polybasic.deploy.rounds.verifier import SPARE_ROWS

Messages = Sequence[dict[str, str]]

_log = logging.getLogger(__name__)


class Options(TypedDict, total=False):
    """What `Chain.generate` and `Chain.stream` may be told; None is the checkpoint's default.

    Attributes:
        max_new_tokens: of the answer at most; 256 by default.
        stop: strings that end the answer, which then ends before them.
        members: which members run, from the target down; by default the plan's.
        plan: run by this one and not by the chain's.

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
        last_statistics: of the last finished generation.
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
        self.last_statistics: Statistics | None = None

    def generate(self, prompt: str | Messages, **options: Unpack[Options]) -> Generation:
        """Answer a prompt, with the target's own distribution whatever members run.

        Args:
            prompt: messages ({"role", "content"}), or a text, which is one user message where
                the tokenizer has a chat template and is continued as it is where it has none.
            options: max_new_tokens, temperature, seed, stop, members and others: see `Options`.

        Raises:
            UserError: a setting out of range, members that cannot run, or what does not fit the
                context.
        """
        pieces = list(self.stream(prompt, **options))
        assert self.last_statistics is not None
        return Generation(
            "".join(piece.text for piece in pieces),
            [token for piece in pieces for token in piece.token_ids],
            self.last_statistics,
        )

    def stream(self, prompt: str | Messages, **options: Unpack[Options]) -> Iterator[Piece]:
        """As `generate`, yielding a piece for each pass of the target.

        Options are checked before the first piece is asked for.
        """
        return self._pieces(*self._answer(prompt, **options))

    def stream_ids(
        self,
        token_ids: list[int],
        max_new_tokens: int,
        sampling: Sampling,
        plan: Plan | None = None,
        stop: str | Sequence[str] = (),
    ) -> Iterator[list[int]]:
        """Continue token ids; yields the new ones as the target confirms them.

        Args:
            sampling: as it is, without the checkpoint's defaults.
            plan: default: the chain's.
        """
        # Text costs time, and is made only to be searched.
        text = AnswerText(self.tokenizer.backend_tokenizer, _strings(stop)) if stop else None
        plan = plan or self.plan
        return self._run(self._request(token_ids, max_new_tokens, sampling, plan, text))

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
        if isinstance(prompt, str):
            if self.tokenizer.chat_template is None:
                return list(self.tokenizer(prompt)["input_ids"])
            prompt = [{"role": "user", "content": prompt}]
        if self.tokenizer.chat_template is None:
            raise UserError(
                "no chat template",
                "the chain's tokenizer",
                "give a text, or package a target whose tokenizer has a template",
            )
        # The engine refuses what is too long; transformers would only warn.
        try:
            encoded = self.tokenizer.apply_chat_template(
                list(prompt),
                add_generation_prompt=True,
                return_dict=True,
                tokenizer_kwargs={"verbose": False},
            )
        except jinja2.TemplateError as error:
            raise UserError(
                "chat template rejects the messages",
                f"the chain's tokenizer ({error})",
                "change the roles or their order",
            ) from error
        return list(encoded["input_ids"])

    def _answer(
        self,
        prompt: str | Messages,
        *,
        max_new_tokens: int = 256,
        stop: str | Sequence[str] = (),
        members: Sequence[str] | None = None,
        plan: Plan | None = None,
        **settings: Any,
    ) -> tuple[AnswerText, Request]:
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
        text = AnswerText(self.tokenizer.backend_tokenizer, _strings(stop))
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
        stop_tokens = self.stop_tokens
        if text is None:
            return Request(token_ids, max_new_tokens, sampling, stop_tokens, plan)
        # A special token has no text in which a stop string could be found.
        special_tokens = self.tokenizer.backend_tokenizer.get_added_tokens_decoder()
        stop_tokens |= {id for id, token in special_tokens.items() if token.content in text.stop}
        return Request(token_ids, max_new_tokens, sampling, stop_tokens, plan, text.cut)

    def _measured_plans(self) -> list[PredictedPlan]:
        measured = self.measured_plan
        return [measured, *measured.others] if measured is not None else []

    def _pieces(self, text: AnswerText, request: Request) -> Iterator[Piece]:
        for new_tokens in self._run(request):
            yield Piece(text.take(), new_tokens)
        if rest := text.finish():
            yield Piece(rest, [])

    def _run(self, request: Request) -> Iterator[list[int]]:
        yield from self.engine.run(request)
        self.last_statistics = request.statistics


def load_chain(
    path: str | Path,
    *,
    device: str | None = None,
    dtype: str | None = None,
    context_tokens: int | None = None,
    plan: Plan | None = None,
    digests: bool = True,
    share_caches: bool = True,
    beyond_declared: bool = False,
    graphs: bool = True,
    say: Callable[[str], None] | None = None,
) -> Chain:
    """Check a chain and load it.

    Args:
        path: a folder, or a hub id org/name[@revision].
        device: default: cuda if there is one, else cpu.
        dtype: "bfloat16", "float16" or "float32"; default: as the target is stored.
        context_tokens: prompt and answer together; caches are allocated for this many. Default:
            what all members are declared for, at most 8192.
        plan: run by this one, not by the manifest's: the one that was measured on this kind of
            machine, or else the one that the chain was packed with.
        digests: compare the sha256 of every file first.
        share_caches: False gives every verifying member a cache of its own.
        beyond_declared: more `context_tokens` than members are declared for are no error. What is
            answered behind as many tokens means nothing; what it costs is right.
        graphs: on a GPU, capture CUDA graphs of passes and rounds, those of the plan at once; False
            launches every kernel by itself, with equal outputs.
        say: takes a line for people about what is captured; default: the log.

    Raises:
        UserError: whatever `check_chain` finds, a plan that the members cannot run, a context
            longer than a member's, more memory than there is, or a graph that cannot be captured.
    """
    return load_checked(
        check_chain(resolve_chain(str(path)), digests=digests),
        device=device,
        dtype=dtype,
        context_tokens=context_tokens,
        plan=plan,
        share_caches=share_caches,
        beyond_declared=beyond_declared,
        graphs=graphs,
        say=say,
    )


def load_checked(
    checked: CheckedChain,
    *,
    device: str | None = None,
    dtype: str | None = None,
    context_tokens: int | None = None,
    plan: Plan | None = None,
    share_caches: bool = True,
    beyond_declared: bool = False,
    graphs: bool = True,
    say: Callable[[str], None] | None = None,
) -> Chain:
    """Load a chain that was checked; see `load_chain`.

    Raises:
        UserError: a plan that the members cannot run, a context longer than a member's, more
            memory than there is, or a graph that cannot be captured.
    """
    where = device_named(device)
    compute_dtype = _dtype(dtype, checked.target)
    for warning in checked.warnings:
        _log.warning("%s", warning)
    default_sampling = read_default_sampling(checked.target)
    chosen = _plan(checked, plan, hardware_name(where))
    num_tokens = _context_tokens(checked, context_tokens, beyond_declared)
    running = chosen.plan if isinstance(chosen, MeasuredPlan) else chosen
    stated = _stated(checked, where, compute_dtype, num_tokens, share_caches)
    if (available := available_bytes(where)) is not None:
        stated.check_fits(available)
    models = _load_models(checked, where, compute_dtype, num_tokens)
    engine = Engine(models, share_caches, graphs)
    _allocate(engine, running)
    release_unused(where)
    tokenizer = load_tokenizer(checked.tokenizer, "chain's tokenizer")
    stop_tokens = read_stop_tokens(checked.target, tokenizer.eos_token_id)
    engine.capture(running, default_sampling, stop_tokens, say or _log.info)
    return Chain(checked, tokenizer, engine, chosen, stop_tokens, default_sampling, stated)


def _allocate(engine: Engine, plan: Plan) -> None:
    """Make what is made when it is first asked for: the drafter's cache, the kernels' buffers."""
    engine.drafters.of(plan)
    models: list[Decoder | EagleHead] = [*engine.models.decoders.values()]
    for model in (*models, *engine.models.drafters.values()):
        _ = model.native, model.device_model


def stated_memory(
    checked: CheckedChain,
    *,
    device: str | None = None,
    dtype: str | None = None,
    context_tokens: int | None = None,
) -> tuple[Memory, int | None]:
    """What a chain will take, and what its device has left where the system tells.

    Args:
        checked: the chain.
        device, dtype, context_tokens: as `load_chain`.

    Raises:
        UserError: a dtype that there is not, or a context longer than a member's.
    """
    where = device_named(device)
    num_tokens = _context_tokens(checked, context_tokens)
    memory = _stated(checked, where, _dtype(dtype, checked.target), num_tokens)
    return memory, available_bytes(where)


def _stated(
    checked: CheckedChain,
    device: torch.device,
    dtype: torch.dtype,
    num_tokens: int,
    share_caches: bool = True,
) -> Memory:
    layout = Layout(device.type, str(dtype).removeprefix("torch."), _kernels(device, dtype))
    return state_memory(checked, layout, num_tokens, share_caches=share_caches)


def _kernels(device: torch.device, dtype: torch.dtype) -> Kernels:
    """Whose layout weights are kept in."""
    if reads_4_bits(device, dtype):
        return "device"
    return "eager" if kernels_for(device, dtype) is None else "native"


def device_named(name: str | None = None) -> torch.device:
    """A device by its name; by default cuda if there is one, else cpu."""
    return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))


def _plan(checked: CheckedChain, given: Plan | None, hardware: str) -> Plan | MeasuredPlan:
    """The plan that runs on this hardware."""
    manifest = checked.manifest
    if given is not None:
        try:
            check_plan(given, manifest.members)
        except ValueError as error:
            names = ", ".join(member.name for member in manifest.members)
            raise UserError("plan cannot run", str(error), f"members: {names}") from error
        return given
    if (measured := manifest.plan_for(hardware)) is not None:
        return measured
    if manifest.plans:
        _log.warning(
            "the chain's plans were measured on %s, not on %s; it runs as it was packed; "
            "measure here: polybasic plan %s",
            " and ".join(measured.hardware for measured in manifest.plans),
            hardware,
            checked.folder,
        )
    return manifest.plan


def _context_tokens(checked: CheckedChain, given: int | None, beyond_declared: bool = False) -> int:
    """Prompt and answer together: as given, or as much as all members are declared for."""
    declared = {}
    for member in checked.manifest.members:
        read = read_head_config if member.kind in HEAD_KINDS else read_decoder_config
        declared[member.name] = read(checked.members[member.name]).context_tokens
    shortest = min(declared, key=lambda name: declared[name])
    if given is None:
        return min(declared[shortest], CONTEXT_TOKENS_BY_DEFAULT)
    if given < 1 or (given > declared[shortest] and not beyond_declared):
        raise UserError(
            "context out of range",
            f"context_tokens={given}",
            f"use 1 to {declared[shortest]}, for which {shortest} is declared",
        )
    return given


def _load_models(
    checked: CheckedChain, device: torch.device, dtype: torch.dtype, context_tokens: int
) -> Models:
    manifest, num_positions = checked.manifest, context_tokens + SPARE_ROWS

    def decoder(name: str) -> Decoder:
        return load_decoder(checked.members[name], dtype, device, num_positions)

    decoders = {member.name: decoder(member.name) for member in manifest.verifying}
    drafters: dict[str, EagleHead | Decoder] = {}
    for member in manifest.drafters:
        if member.kind in HEAD_KINDS:
            verifier = decoders[member.drafts_for[0]]
            head = load_head(checked.members[member.name], verifier, num_positions)
            drafters[member.name] = head
        else:
            drafters[member.name] = decoder(member.name)
    return Models(decoders, drafters, manifest.members, context_tokens)


def _strings(stop: str | Sequence[str]) -> tuple[str, ...]:
    return (stop,) if isinstance(stop, str) else tuple(stop)


def _dtype(name: str | None, target: Path) -> torch.dtype:
    if name is None:
        config = read_json(target / "config.json", "model config")
        name = stored_dtype(config)
    known = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
    if name not in known:
        raise UserError("unknown dtype", f"dtype={name}", f"use one of {', '.join(known)}")
    return known[name]
