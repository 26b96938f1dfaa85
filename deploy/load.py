"""Chains from their folders into memory: what is chosen, what is refused, what it will take."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from pydantic import ConfigDict, Field

from polybasic.chain.errors import UserError
from polybasic.chain.formats.checkpoint import resolve_chain
from polybasic.chain.formats.decoder_config import DecoderConfig
from polybasic.chain.formats.extensions import resolve
from polybasic.chain.formats.head_kinds.table import HEAD_KINDS
from polybasic.chain.formats.manifest import is_head
from polybasic.chain.formats.plan import MeasuredPlan, Plan
from polybasic.chain.formats.tokenizer import load_tokenizer
from polybasic.chain.formats.verify import CheckedChain, check_chain
from polybasic.chain.kernels.executor import Executor
from polybasic.chain.kernels.product_times import DTYPES, multiplies_fast, name_of
from polybasic.chain.kernels.selection import backend_for
from polybasic.chain.model.loading import load_decoder, serving_dtype
from polybasic.chain.settings import Settings, arguments
from polybasic.deploy.chain import Chain, checked_plan
from polybasic.deploy.defaults import read_default_sampling, read_stop_tokens
from polybasic.deploy.drafters.expansion import MakeDrafter
from polybasic.deploy.engine import Engine
from polybasic.deploy.hardware import available_bytes, hardware_name, release_unused
from polybasic.deploy.memory import Kernels, Layout, Memory, state_memory
from polybasic.deploy.rounds.verifier import SPARE_ROWS
from polybasic.deploy.slots import CONTEXT_TOKENS_BY_DEFAULT, Models

MAX_SEQUENCES = 1024
"""That may be asked for."""
_log = logging.getLogger(__name__)


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
        share_caches: False gives every verifying member a cache of its own.
        beyond_declared: more `context_tokens` than members are declared for are no error. What is
            answered after as many tokens means nothing; what it costs is right.
        graphs: on a GPU, capture CUDA graphs of passes and rounds, those of the plan at once; False
            launches every kernel by itself, with equal outputs.
        sequences: most answers at a time, whose caches are all allocated at once. Default: 16 on a
            CPU, whose caches are allocated when they are needed, and 1 on a GPU, where rounds are
            captured for one; with more they run through the host.
        reuses: what was read of an earlier answer's leading tokens is not read again. Default:
            where that changes no bit.
        say: takes a line for people about what is captured; default: the log.
    """

    model_config = ConfigDict(strict=True)

    device: str | None = Field(None, description="cpu or cuda, or one GPU as in cuda:1")
    dtype: str | None = Field(None, description="auto or a dtype's name")
    context_tokens: int | None = Field(None, description="a number of tokens")
    plan: Plan | None = Field(None, description="a Plan")
    share_caches: bool = Field(True, description="true or false")
    beyond_declared: bool = Field(False, description="true or false")
    graphs: bool = Field(True, description="true or false")
    sequences: int | None = Field(None, ge=1, le=MAX_SEQUENCES, description="a number of answers")
    reuses: bool | None = Field(None, description="true or false")
    say: Callable[[str], None] | None = Field(None, description="a function of a line")


def load_chain(path: str | Path, *, digests: bool = True, **options: Any) -> Chain:
    """Check a chain and load it.

    Args:
        path: a folder, or a hub id org/name[@revision].
        digests: compare the sha256 of every file first.
        options: device, dtype, context_tokens, plan and others: see `LoadOptions`.

    Raises:
        UserError: whatever `check_chain` finds, a plan that the members cannot run, a context
            longer than a member's, more memory than there is, or a graph that cannot be captured.
    """
    given = arguments(LoadOptions, options)
    return load_checked(check_chain(resolve_chain(str(path)), digests=digests), given)


def load_checked(checked: CheckedChain, options: LoadOptions) -> Chain:
    """Load a chain that was checked.

    Raises:
        UserError: a plan that the members cannot run, a context longer than a member's, more
            memory than there is, or a graph that cannot be captured.
    """
    device, dtype = device_named(options.device), _dtype(checked, options)
    for warning in checked.warnings:
        _log.warning("%s", warning)
    default_sampling = read_default_sampling(checked.target)
    chosen = _plan(checked, options.plan, hardware_name(device))
    running = chosen.plan if isinstance(chosen, MeasuredPlan) else chosen
    stated = _stated(checked, options)
    if (available := available_bytes(device)) is not None:
        stated.check_fits(available)
    models = _load_models(checked, device, dtype, stated.context_tokens)
    engine = Engine(models, options.share_caches, options.graphs, options.sequences, options.reuses)
    _allocate(engine, running, options.sequences or 1)
    release_unused(device)
    tokenizer = load_tokenizer(checked.tokenizer, "chain's tokenizer")
    stop_tokens = read_stop_tokens(checked.target_config, tokenizer.eos_token_id)
    engine.capture(running, default_sampling, stop_tokens, options.say or _log.info)
    return Chain(checked, tokenizer, engine, chosen, stop_tokens, default_sampling, stated)


def stated_memory(checked: CheckedChain, options: LoadOptions) -> tuple[Memory, int | None]:
    """What a chain will take, and what its device has left where the system tells.

    Raises:
        UserError: a dtype that there is not, or a context longer than a member's.
    """
    return _stated(checked, options), available_bytes(device_named(options.device))


def device_named(name: str | None = None) -> torch.device:
    """A device by its name; by default cuda if there is one, else cpu.

    Raises:
        UserError: this machine has no such device.
    """
    known = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    known += [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    if name is not None and name not in known:
        raise UserError("unknown device", f"device={name}", f"here there are {', '.join(known)}")
    return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))


def _allocate(engine: Engine, plan: Plan, sequences: int) -> None:
    """Make what is made when it is first asked for: the caches of sequences and drafters."""
    for _ in range(1, sequences):
        engine.slots.make()
    for slot in engine.slots.made:
        slot.drafters.of(plan)


def _stated(checked: CheckedChain, options: LoadOptions) -> Memory:
    device, dtype = device_named(options.device), _dtype(checked, options)
    kernels = _kernels(device, dtype, checked.target_config.decoder)
    layout = Layout(
        device.type,
        name_of(dtype),
        kernels,
        widens=device.type == "cpu"
        and kernels == "eager"
        # 4-bit products keep a copy that was rounded to bfloat16
        and not (multiplies_fast(dtype) and multiplies_fast(torch.bfloat16)),
    )
    num_tokens = _context_tokens(checked, options)
    return state_memory(
        checked,
        layout,
        num_tokens,
        share_caches=options.share_caches,
        sequences=options.sequences or 1,
    )


def _kernels(device: torch.device, dtype: torch.dtype, config: DecoderConfig) -> Kernels:
    """Whose layout weights are kept in."""
    backend = backend_for(device, dtype, config)
    if not backend.packs_4_bits:
        return "eager"
    return "native" if backend.name == "cpu" else "device"


def _plan(checked: CheckedChain, given: Plan | None, hardware: str) -> Plan | MeasuredPlan:
    """The plan that runs on this hardware."""
    manifest = checked.manifest
    if given is not None:
        return checked_plan(given, manifest)
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


def _context_tokens(checked: CheckedChain, options: LoadOptions) -> int:
    """Prompt and answer together: as given, or as much as all members are declared for."""
    given = options.context_tokens
    declared = {
        member.name: checked.configs[member.name].of(member.kind).context_tokens
        for member in checked.manifest.members
    }
    shortest = min(declared, key=lambda name: declared[name])
    if given is None:
        return min(declared[shortest], CONTEXT_TOKENS_BY_DEFAULT)
    if given < 1 or (given > declared[shortest] and not options.beyond_declared):
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

    def decoder(name: str) -> Executor:
        return load_decoder(checked.configs[name], dtype, device, num_positions)

    decoders = {member.name: decoder(member.name) for member in manifest.verifying}
    drafters: dict[str, Executor] = {}
    makers: dict[str, MakeDrafter] = {}
    for member in manifest.drafters:
        name = member.name
        if not is_head(member.kind):
            drafters[name] = decoder(name)
            continue
        kind, where = HEAD_KINDS[member.kind], f"kind {member.kind} of {name}"
        verifier = decoders[member.drafts_for[0]]
        load = resolve(kind.load, where)
        drafters[name] = load(checked.configs[name], verifier, num_positions)
        makers[name] = resolve(kind.drafter, where)
    drafts_for = {member.name: member.drafts_for for member in manifest.drafters}
    return Models(decoders, drafters, drafts_for, context_tokens, makers)


def _dtype(checked: CheckedChain, options: LoadOptions) -> torch.dtype:
    is_given = options.dtype not in (None, "auto")
    name = options.dtype if is_given else checked.target_config.dtype
    if name not in DTYPES:
        raise UserError("unknown dtype", f"dtype={name}", f"use one of {', '.join(DTYPES)}")
    return DTYPES[name] if is_given else serving_dtype(DTYPES[name], device_named(options.device))
