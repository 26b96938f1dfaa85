"""`polybasic serve`: a chain behind OpenAI's HTTP interface."""

import gc
import os
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polybasic.chain.base.errors import UserError
from polybasic.chain.base.terminal import say
from polybasic.recipes.cli.chain import ChainArgument, note_bare
from polybasic.recipes.cli.shared.lossy import PlanFileOption, plan_in
from polybasic.recipes.cli.shared.options import (
    DeviceOption,
    DtypeOption,
    KeyFileOption,
    MaxNumSeqsOption,
    NoGraphsOption,
    RemoteOption,
    SmallOption,
    TargetOption,
    TensorParallelOption,
    TlsCertificateOption,
    WaitOption,
    as_named,
    remote_options,
    with_small,
)

if TYPE_CHECKING:
    from socket import socket

    from polybasic.deploy import Chain
    from polybasic.deploy.serve.settings import ServeSettings


def serve(
    chain: ChainArgument,
    small: SmallOption = None,
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen at; 0: a free one.")
    ] = 8000,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY",
            help="That requests have to carry; may be repeated. Others see it in the list of "
            "processes: a file is better.",
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(help="File with a key a line.  [default: POLYBASIC_API_KEY, one key]"),
    ] = None,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Name in requests; may be repeated.  [default: chain's]"),
    ] = None,
    max_model_len: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Prompt and answer together.  "
            "[default: what the models are made for, at most 8192]",
        ),
    ] = None,
    max_num_seqs: MaxNumSeqsOption = 16,
    cache_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="That the caches of all answers hold together, on a CPU; when there are more, the "
            "latest answers pause.  [default: as many as fit]",
        ),
    ] = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    plan: PlanFileOption = None,
    max_queue: Annotated[
        int, typer.Option(min=0, help="Answers that may wait; beyond it requests get a 503.")
    ] = 256,
    max_queued_tokens: Annotated[
        int, typer.Option(min=0, help="Tokens of prompts that may wait.")
    ] = 262_144,
    request_timeout: Annotated[
        float, typer.Option(help="Seconds of a request, waiting included.")
    ] = 600,
    shutdown_timeout: Annotated[
        float, typer.Option(min=0, help="Seconds that answers in flight get after SIGTERM.")
    ] = 30,
    max_body: Annotated[int, typer.Option(min=1, help="Bytes of a request's body.")] = 4 << 20,
    max_buffered: Annotated[
        int, typer.Option(min=1, help="Bytes of bodies over 64 KiB at a time.")
    ] = 32 << 20,
    allowed_hosts: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="That requests may call this server by; may be repeated.  [default: localhost and "
            "--host, where that is this machine alone and no key is needed; else any]",
        ),
    ] = None,
    allowed_origins: Annotated[
        list[str] | None,
        typer.Option(metavar="ORIGIN", help="Of pages elsewhere that may ask; may be repeated."),
    ] = None,
    allow_special_tokens: Annotated[
        bool,
        typer.Option(
            "--allow-special-tokens",
            help="Contents of messages may spell control tokens; else these are plain text.",
        ),
    ] = False,
    log_format: Annotated[str, typer.Option(help="Of the log on stderr: text or json.")] = "text",
    no_history: Annotated[
        bool, typer.Option("--no-history", help="Copy no drafts from what was said before.")
    ] = False,
    learn: Annotated[
        bool,
        typer.Option(
            "--learn",
            help="The draft head learns from answers while nobody asks; kept beside the chain.",
        ),
    ] = False,
    no_page: Annotated[bool, typer.Option("--no-page", help="No chat page at /.")] = False,
    no_graphs: NoGraphsOption = False,
    target: TargetOption = None,
    remote: RemoteOption = None,
    key_file: KeyFileOption = None,
    tls_certificate: TlsCertificateOption = None,
    no_optimism: WaitOption = False,
    tensor_parallel: TensorParallelOption = None,
) -> None:
    """Answer requests over HTTP as OpenAI's API does. SIGTERM or Ctrl-C ends it."""
    from polybasic.deploy.serve.settings import ServeSettings
    from polybasic.recipes.schema.loading import validated

    given: dict[str, Any] = {
        "model_names": served_model_name or [Path(chain).name],
        "api_keys": _keys(api_key or [], api_key_file),
        "sequences": max_num_seqs,
        "queue": max_queue,
        "queued_tokens": max_queued_tokens,
        "request_seconds": request_timeout,
        "body_bytes": max_body,
        "buffer_bytes": max_buffered,
        "allowed_hosts": [name.lower() for name in allowed_hosts or []],
        "allowed_origins": allowed_origins or [],
        "special_tokens": allow_special_tokens,
        "history": not no_history,
        "page": not no_page,
        "log_format": log_format,
    }
    settings = validated(ServeSettings, given, {}, "on the command line")
    _check_installed()
    from polybasic.chain.base.logs import log_to_stderr
    from polybasic.deploy import load_chain
    from polybasic.deploy.runtime.listening import bound
    from polybasic.deploy.serve.app import create_app
    from polybasic.deploy.serve.server import Server

    listening = bound(host, port, f"--host {host} --port {port}", "--port 0")
    if not (settings.allowed_hosts or settings.api_keys) and _is_loopback(listening):
        named = dict.fromkeys(("localhost", host.lower(), "127.0.0.1", "::1"))
        settings = settings.model_copy(update={"allowed_hosts": tuple(named)})
    options: dict[str, Any] = {"dtype": dtype, "context_tokens": max_model_len, "say": say}
    options |= {"sequences": max_num_seqs, "cache_tokens": cache_tokens}
    options |= {"device": device, "target": target}
    options |= remote_options(remote, key_file, tls_certificate, no_optimism)
    options["tensor_parallel"] = tensor_parallel
    loaded = load_chain(
        with_small(chain, small), graphs=not no_graphs, plan=plan_in(plan), **options
    )
    note_bare(loaded, as_named(chain, small))
    if not served_model_name:
        settings = settings.model_copy(update={"model_names": (_name(loaded),)})
    learner = None
    if learn:
        from polybasic.recipes.pipeline.learning import ChainLearner

        learner = ChainLearner(loaded)
    app = create_app(loaded, settings, learner)
    # what is loaded stays; each full collection would walk it for a fifth of a second
    gc.collect()
    gc.freeze()
    address = listening.getsockname()
    log_to_stderr(settings.log_format)
    about = "\n".join(_about(loaded, settings, f"http://{host}:{address[1]}"))
    about = about if learner is None else f"{about}\n{learner.about}"
    Server(app, shutdown_timeout, lambda: say(about)).run([listening])
    if (lost := app.state.service.scheduler.lost) is not None:
        raise lost


def _is_loopback(listening: "socket") -> bool:
    """Whether programs of this machine alone reach it."""
    return ip_address(listening.getsockname()[0]).is_loopback


def _keys(given: list[str], path: Path | None) -> list[str]:
    from polybasic.chain.formats.files import read_secret

    keys = list(given)
    if path is not None:
        lines = map(str.strip, read_secret(path, "API keys").splitlines())
        keys += [line for line in lines if line]
    elif not keys and (key := os.environ.get("POLYBASIC_API_KEY")):
        keys.append(key)
    if path is not None and not keys:
        raise UserError("no API key", f"--api-key-file {path}", "write one on each line")
    return keys


def _check_installed() -> None:
    try:
        import fastapi  # noqa: F401
        import markdown_it  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise UserError(
            "server not installed", f"{error.name}", "pip install 'polybasic[serve]'"
        ) from error


def _name(chain: "Chain") -> str:
    """The recipe's, or that of the folder."""
    recipe: dict[str, Any] = chain.manifest.provenance.recipe
    return str(recipe.get("name") or chain.folder.name)


def _plans(chain: "Chain") -> str:
    """Members by load, the target first."""
    from polybasic.chain.formats.card import shown_rule

    if not chain.plan.is_lossless:
        return f"{' <- '.join(chain.plan.members)}; {shown_rule(chain.plan)}"
    measured = chain.measured_plan
    if measured is None or not measured.by_load:
        return " <- ".join(chain.plan.members)
    plans = [f"{load.sequences}: {' <- '.join(load.plan.members)}" for load in measured.by_load]
    return f"by answers at a time, {'; '.join(plans)}"


def _about(chain: "Chain", settings: "ServeSettings", address: str) -> list[str]:
    """What people want to know of a server that has started."""
    members = ", ".join(
        f"{member.name} ({member.num_parameters / 1e6:.0f} M, {member.dtype})"
        for member in chain.manifest.members
    )
    from polybasic.chain.base.readable import readable_bytes
    from polybasic.deploy.serve.buffers import BYTES_OF_BODY

    memory = chain.memory
    return [
        f"chain {chain.folder} as {', '.join(settings.model_names)}: {members}",
        f"plan: {_plans(chain)}",
        f"memory: {memory.shown}, for {settings.sequences} answers at a time of "
        f"{memory.context_tokens} tokens with their prompts, {memory.cache_tokens} together; "
        f"bodies of requests take up to {readable_bytes(BYTES_OF_BODY * settings.room_bytes)} more",
        f"listening at {address}"
        + ("; a key is needed" if settings.api_keys else "; no key is needed"),
    ]
