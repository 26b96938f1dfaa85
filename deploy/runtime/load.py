"""Chains from their folders into memory: what is chosen, what is refused, what it will take."""

import logging
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from polybasic.chain.base.errors import UserError
from polybasic.chain.base.readable import counted
from polybasic.chain.base.settings import arguments
from polybasic.chain.formats.card import shown_plan
from polybasic.chain.formats.chains import resolve_chain
from polybasic.chain.formats.checkpoints.block_types import BLOCK_TYPES
from polybasic.chain.formats.checkpoints.config import read_config
from polybasic.chain.formats.checkpoints.decoder_config import DecoderConfig
from polybasic.chain.formats.checkpoints.kinds import is_head
from polybasic.chain.formats.checkpoints.shard import check_divisible
from polybasic.chain.formats.extensions import resolve
from polybasic.chain.formats.head_kinds.table import HEAD_KINDS, steers
from polybasic.chain.formats.kept import known_sha256
from polybasic.chain.formats.learned import learned_folder, read_learned, undone_by
from polybasic.chain.formats.lineage import find_steered
from polybasic.chain.formats.manifest import read_manifest
from polybasic.chain.formats.plan import MeasuredPlan, Plan, PlansByTemperature
from polybasic.chain.formats.tokenizer import load_tokenizer
from polybasic.chain.formats.verify import CheckedChain, check_chain
from polybasic.chain.kernels.executor import Executor
from polybasic.chain.kernels.product_times import DTYPES, multiplies_fast, name_of
from polybasic.chain.kernels.selection import backend_for
from polybasic.chain.model.loading import load_decoder, serving_dtype
from polybasic.deploy.runtime.chain import Chain, checked_plan
from polybasic.deploy.runtime.defaults import read_default_sampling, read_stop_tokens
from polybasic.deploy.runtime.drafters.expansion import MakeDrafter, MakeSharingDrafter
from polybasic.deploy.runtime.engine import Engine
from polybasic.deploy.runtime.hardware import (
    available_bytes,
    device_named,
    hardware_name,
    release_unused,
)
from polybasic.deploy.runtime.memory import Kernels, Layout, Memory, state_memory
from polybasic.deploy.runtime.models import CONTEXT_TOKENS_BY_DEFAULT, Models
from polybasic.deploy.runtime.options import LoadOptions
from polybasic.deploy.runtime.parallel.leader import Leader
from polybasic.deploy.runtime.remote.keys import client_tls, identity_of, read_key
from polybasic.deploy.runtime.remote.link import Link
from polybasic.deploy.runtime.remote.requests import plan_over_link
from polybasic.deploy.runtime.remote.target import Address, RemoteTarget, host_and_port
from polybasic.deploy.runtime.rounds.verifier import SPARE_ROWS
from polybasic.deploy.runtime.slots import SEQUENCES_BY_DEFAULT

_log = logging.getLogger(__name__)


def load_chain(path: str | Path, *, digests: bool = True, **options: Any) -> Chain:
    """Check a chain and load it.

    Args:
        path: a folder, or a hub id org/name[@revision].
        digests: compare the sha256 of every file first, which of a large one is kept in the cache
            until the file changes.
        options: device, dtype, context_tokens, plan and others: see `LoadOptions`.

    Raises:
        UserError: whatever `check_chain` finds, a plan that the members cannot run, a context
            longer than a member's, more memory than there is, or a graph that cannot be captured.
    """
    given = arguments(LoadOptions, options)
    folder = resolve_chain(str(path))
    elsewhere = () if given.remote is None else (read_manifest(folder).members[0].name,)
    checked = check_chain(folder, digests, elsewhere, given.target, known_sha256)
    return load_checked(checked, given)


def load_target(path: str | Path, *, digests: bool = True, **options: Any) -> Chain:
    """Load the target of a chain alone; weights of other members need not be there.

    Args:
        path, digests, options: as `load_chain`.

    Raises:
        UserError: as `load_chain`.
    """
    given, folder = arguments(LoadOptions, options), resolve_chain(str(path))
    others = [member.name for member in read_manifest(folder).members[1:]]
    checked = check_chain(folder, digests, others, given.target, known_sha256)
    # which members run is decided where the others are
    given = given.model_copy(update={"plan": checked.manifest.plan})
    return load_checked(checked, given, can_pause=False)


def load_checked(checked: CheckedChain, options: LoadOptions, can_pause: bool = True) -> Chain:
    """Load a chain that was checked.

    Args:
        can_pause: whether a sequence can give its caches up, as those of a server of its target
            cannot.

    Raises:
        UserError: a plan that the members cannot run, a context longer than a member's, more
            memory than there is, or a graph that cannot be captured.
    """
    begun = time.monotonic()
    is_alone = options.tensor_parallel == 1 and options.remote is None
    device, dtype = device_named(options.device), _dtype(checked, options)
    for warning in checked.warnings:
        _log.warning("%s", warning)
    default_sampling = read_default_sampling(checked.target)
    remote = None
    if options.remote is not None:
        remote, options = _remote(checked, options, options.remote)
    num_parts, stated = options.tensor_parallel, _stated(checked, options)
    is_on_host = device.type == "cpu" and stated.layout.kernels != "device"
    by_need = can_pause and is_alone and is_on_host
    if options.cache_tokens is not None and not by_need:
        raise UserError(
            "caches that each hold a whole context",
            f"cache_tokens={options.cache_tokens}",
            "leave it out on a GPU, with several processes, and where a member runs elsewhere",
        )
    if (available := available_bytes(device)) is not None:
        if by_need and options.cache_tokens is None:
            stated = stated.fitting(available)
        stated.check_fits(available)
    hardware = hardware_name(device, num_parts)
    measured = _measured_plans(checked, options, hardware, name_of(dtype))
    temperature = options.temperature
    if temperature is None:
        temperature = default_sampling.temperature
    chosen = _chosen_plan(checked, options.plan, measured.at(temperature))
    leader = Leader(num_parts, device) if num_parts > 1 else None
    checked = _with_learned(checked, options)
    models = _load_models(checked, device, dtype, stated, options.graphs, leader)
    if remote is not None:
        models.remote = remote
        if options.plan is None:
            here = hardware_name(device)
            usual = _plans(chosen)
            chosen = plan_over_link(checked.manifest, here, usual, remote, models, temperature)
            measured = PlansByTemperature()
    running = chosen.plan if isinstance(chosen, MeasuredPlan) else chosen
    engine = Engine(
        models,
        options.share_caches,
        options.graphs,
        options.sequences,
        options.reuses,
        cache_tokens=_cache_tokens(stated, options) if by_need else None,
        kept_tokens=stated.cache_tokens if by_need else None,
    )
    _allocate(engine, running, options.sequences or 1)
    release_unused(device)
    tokenizer = load_tokenizer(checked.tokenizer, "chain's tokenizer")
    stop_tokens = read_stop_tokens(checked.target_config, tokenizer.eos_token_id)
    engine.capture(running, default_sampling, stop_tokens, options.say or _log.info)
    _log.info(
        "loaded %s in %.1f s: %s, %s, %s; plan: %s",
        checked.folder,
        time.monotonic() - begun,
        hardware,
        name_of(dtype),
        f"{stated.layout.kernels} kernels",
        shown_plan(running, [member.name for member in checked.manifest.verifying]),
    )
    given = checked, tokenizer, engine, chosen, stop_tokens, default_sampling, stated
    return Chain(*given, measured)


def stated_memory(checked: CheckedChain, options: LoadOptions) -> tuple[Memory, int | None]:
    """What a chain will take, and what its device has left where the system tells.

    Raises:
        UserError: a dtype that there is not, or a context longer than a member's.
    """
    return _stated(checked, options), available_bytes(device_named(options.device))


def _cache_tokens(stated: Memory, options: LoadOptions) -> int:
    """Tokens that caches which fill by need may hold, once the weights are loaded."""
    if options.cache_tokens is not None or options.sequences is not None:
        return stated.cache_tokens
    most = SEQUENCES_BY_DEFAULT * stated.context_tokens
    available = available_bytes(torch.device("cpu"))
    if available is None or not stated.token_bytes:
        return most
    return min(most, stated.context_tokens + int(available / 2 / stated.token_bytes))


def serving_conditions(path: str | Path, **options: Any) -> tuple[str, str]:
    """Hardware and dtype that a chain would be loaded for, as measured plans name them.

    Args:
        options: of `LoadOptions`.

    Raises:
        UserError: as `load_chain`, digests and weights aside.
    """
    given = arguments(LoadOptions, options)
    checked = check_chain(resolve_chain(str(path)), digests=False)
    hardware = hardware_name(device_named(given.device), given.tensor_parallel)
    return hardware, name_of(_dtype(checked, given))


def measured_link(path: str | Path, **options: Any) -> Link:
    """The link to a remote target, by pings, to two digits.

    Args:
        options: target, remote, key_file and tls_certificate of `LoadOptions`.

    Raises:
        UserError: the target is not reached, or is that of another chain.
    """
    given = arguments(LoadOptions, options)
    assert given.remote is not None, "a remote target"
    folder = resolve_chain(str(path))
    name = read_manifest(folder).members[0].name
    checked = check_chain(folder, False, (name,), given.target)
    remote, _ = _remote(checked, given, given.remote)
    remote.close()
    link = remote.link
    return Link(float(f"{link.round_trip_seconds:.2g}"), float(f"{link.bytes_per_second:.2g}"))


def _allocate(engine: Engine, plan: Plan, sequences: int) -> None:
    """Make what is made when it is first asked for: the caches of sequences and drafters."""
    for _ in range(1, sequences):
        engine.slots.make()
    for slot in engine.slots.made:
        slot.drafters.of(plan)


def _stated(checked: CheckedChain, options: LoadOptions) -> Memory:
    device, dtype = device_named(options.device), _dtype(checked, options)
    layouts = _layouts(checked, device, dtype)
    num_tokens = _context_tokens(checked, options)
    verifying = [
        (member.name, file.decoder, file.group_size)
        for member in checked.loaded
        if member.role != "drafter"
        for file in [checked.configs[member.name]]
    ]
    _check_layers_are_whole(checked, options.tensor_parallel)
    if checked.target_config.decoder.encoder is not None:
        _check_sources_can_be_read(options)
    check_divisible(verifying, options.tensor_parallel)
    stated = state_memory(
        checked,
        layouts[checked.manifest.members[0].name],
        num_tokens,
        others=layouts,
        share_caches=options.share_caches,
        sequences=options.sequences or 1,
        num_parts=options.tensor_parallel,
    )
    if options.cache_tokens is None:
        return stated
    if options.cache_tokens < num_tokens:
        raise UserError(
            "caches that do not hold one context",
            f"cache_tokens={options.cache_tokens}, context_tokens={num_tokens}",
            "ask for more cache_tokens, or a shorter context",
        )
    return stated.holding(options.cache_tokens)


def _check_layers_are_whole(checked: CheckedChain, num_parts: int) -> None:
    """Refuse to divide a model whose layers a drafter runs, too."""
    for member in checked.loaded if num_parts > 1 else ():
        if is_head(member.kind) and HEAD_KINDS[member.kind].shares_cache:
            raise UserError(
                "no process has whole layers",
                f"{member.name} runs those of {member.drafts_for[0]}, tensor_parallel={num_parts}",
                "load the chain in one process, or package it without this member",
            )


def _check_sources_can_be_read(options: LoadOptions) -> None:
    """Refuse what an encoder's source does not allow."""
    asked = {
        f"tensor_parallel={options.tensor_parallel}": options.tensor_parallel > 1,
        f"reuses={options.reuses}": bool(options.reuses),
    }
    for what, is_asked in asked.items():
        if is_asked:
            where = f"{what}: an encoder reads its whole source at once"
            raise UserError("unsupported of encoder-decoders", where, "leave it out")


def layout_of(
    device: torch.device, dtype: torch.dtype, *configs: DecoderConfig, in_few_bits: bool = False
) -> Layout:
    """How the weights of a model, or of models that share weights, lie when they are loaded.

    Args:
        configs: of the models, as of `backend_for`.
        in_few_bits: whether the verifying one is stored in 4 to 8 bits.
    """
    backend = backend_for(device, dtype, *configs)
    if backend.packs_4_bits:
        kernels: Kernels = "native" if backend.name == "cpu" else "device"
        return Layout(device.type, name_of(dtype), kernels, in_few_bits=in_few_bits)
    on_cpu = device.type == "cpu"
    widened = [
        name for name, torch_dtype in DTYPES.items() if on_cpu and not multiplies_fast(torch_dtype)
    ]
    return Layout(device.type, name_of(dtype), "eager", tuple(widened))


def _layouts(checked: CheckedChain, device: torch.device, dtype: torch.dtype) -> dict[str, Layout]:
    """By member, as `_load_models` loads them."""
    configs, members = checked.configs, checked.manifest.members
    found = {}
    for member in members:
        file = configs[member.name]
        read: list[DecoderConfig] = [file.of(member.kind)]
        if is_head(member.kind):
            kind = HEAD_KINDS[member.kind]
            if kind.steers:
                steered = find_steered(member.name, file, members, configs)
                read = [configs[steered.name].decoder]
            else:
                # a head without layers of its own has its verifier's backend
                above = configs[member.drafts_for[0]].decoder
                read = [above] if kind.layer is None else [above, *read]
        verifier = checked.manifest.member(next(iter(member.drafts_for), member.name))
        in_few_bits = verifier.kind == "awq" or verifier.dtype in BLOCK_TYPES
        found[member.name] = layout_of(device, dtype, *read, in_few_bits=in_few_bits)
    return found


def _measured_plans(
    checked: CheckedChain, options: LoadOptions, hardware: str, dtype: str
) -> PlansByTemperature:
    """What was measured for this hardware and dtype, unless a plan is given."""
    if options.plan is not None:
        return PlansByTemperature()
    manifest = checked.manifest
    why = manifest.lacks(hardware, dtype)
    if why is not None and any(measured.link is None for measured in manifest.plans):
        _log.warning(
            "%s; it runs as it was packed; measure here: polybasic plan %s%s",
            why,
            checked.folder,
            "" if options.dtype in (None, "auto") else f" --dtype {dtype}",
        )
    return manifest.plans_for(hardware, dtype)


def _chosen_plan(
    checked: CheckedChain, given: Plan | None, measured: MeasuredPlan | None
) -> Plan | MeasuredPlan:
    """The plan that runs unless an answer asks for another one."""
    if given is not None:
        return checked_plan(given, checked.manifest)
    return measured or checked.manifest.plan


def _plans(chosen: Plan | MeasuredPlan) -> list[Plan]:
    """The chosen plan, and the best ones of other members."""
    if isinstance(chosen, Plan):
        return [chosen]
    return [chosen.plan, *(other.plan for other in chosen.others)]


def _remote(
    checked: CheckedChain, options: LoadOptions, where: str
) -> tuple[RemoteTarget, LoadOptions]:
    """The target elsewhere, and the options for a context that both sides have room for."""
    if options.key_file is None:
        raise UserError("no key", f"remote={where}", "give the key file that its server has")
    key, tls = read_key(Path(options.key_file)), options.tls_certificate
    address = Address(*host_and_port(where), key, None if tls is None else client_tls(Path(tls)))
    target, vocab_size = checked.manifest.members[0], checked.target_config.decoder.vocab_size
    chain = identity_of(checked.manifest)
    remote = RemoteTarget(target.name, vocab_size, chain, address, options.optimistic)
    num_tokens, num_far = _context_tokens(checked, options), remote.context_tokens
    if options.context_tokens is not None and num_tokens > num_far:
        raise UserError(
            "context out of range",
            f"context_tokens={num_tokens}, {num_far} at {address}",
            "ask for fewer, or give the server a longer one",
        )
    return remote, options.model_copy(update={"context_tokens": min(num_tokens, num_far)})


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


def _with_learned(checked: CheckedChain, options: LoadOptions) -> CheckedChain:
    """The chain with the head beside it that has learned from answers, if there is one."""
    learned = read_learned(checked.folder)
    if learned is None or learned.member in checked.elsewhere:
        return checked
    folder, undone = learned_folder(checked.folder), undone_by(checked.folder)
    if not learned.fits(checked.manifest):
        _log.warning("not used, it began as another head: %s; remove it: %s", folder, undone)
        return checked
    answers = counted(learned.num_answers, "answer")
    (options.say or _log.info)(f"{learned.member} has learned from {answers}; undo it: {undone}")
    config = read_config(folder)
    return replace(checked, configs=checked.configs | {learned.member: config})


def _load_models(
    checked: CheckedChain,
    device: torch.device,
    dtype: torch.dtype,
    stated: Memory,
    graphs: bool,
    leader: Leader | None,
) -> Models:
    manifest, context_tokens = checked.manifest, stated.context_tokens
    num_positions = context_tokens + SPARE_ROWS

    def decoder(name: str) -> Executor:
        file, is_checked = checked.configs[name], name != manifest.members[0].name
        return load_decoder(file, dtype, device, num_positions, is_checked=is_checked)

    loaded = {member.name for member in checked.loaded}
    verifying = [member.name for member in manifest.verifying if member.name in loaded]
    if leader is None:
        decoders = {name: decoder(name) for name in verifying}
    else:
        device = leader.device
        decoders = leader.load(checked, dtype, context_tokens, graphs, stated.follower_bytes)
    drafters: dict[str, Executor] = {}
    makers: dict[str, MakeDrafter] = {}
    sharing_makers: dict[str, MakeSharingDrafter] = {}
    # models before what steers them
    for member in sorted(manifest.drafters, key=lambda drafter: steers(drafter.kind)):
        name = member.name
        drafted = [verifier for verifier in member.drafts_for if verifier in decoders]
        if name not in loaded or (is_head(member.kind) and not drafted):
            continue
        if not is_head(member.kind):
            drafters[name] = decoder(name)
            continue
        kind, where = HEAD_KINDS[member.kind], f"kind {member.kind} of {name}"
        load, config = resolve(kind.load, where), checked.configs[name]
        if kind.steers:
            steered = find_steered(name, config, manifest.members, checked.configs).name
            drafters[name] = load(config, decoders[drafted[0]], drafters[steered])
        else:
            drafters[name] = load(config, decoders[drafted[0]], num_positions)
        (sharing_makers if kind.shares_cache else makers)[name] = resolve(kind.drafter, where)
    drafts_for = {
        drafter.name: drafter.drafts_for
        for drafter in manifest.drafters
        if drafter.name in drafters
    }
    given = decoders, drafters, drafts_for, context_tokens, makers
    return Models(*given, leader=leader, sharing_makers=sharing_makers)


def _dtype(checked: CheckedChain, options: LoadOptions) -> torch.dtype:
    if options.dtype in (None, "auto"):
        return serving_dtype(checked.target_config, device_named(options.device))
    if options.dtype not in DTYPES:
        raise UserError(
            "unknown dtype", f"dtype={options.dtype}", f"use one of {', '.join(DTYPES)}"
        )
    return DTYPES[options.dtype]
