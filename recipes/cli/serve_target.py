"""`polybasic serve-target`: the target of a chain, for stages that run elsewhere."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polybasic.chain.base.errors import UserError
from polybasic.chain.base.terminal import say
from polybasic.recipes.cli.chain import ChainArgument
from polybasic.recipes.cli.shared.options import (
    ContextOption,
    DeviceOption,
    DtypeOption,
    MaxNumSeqsOption,
    TargetOption,
    TensorParallelOption,
)

if TYPE_CHECKING:
    from polybasic.deploy import Chain


def serve_target(
    chain: ChainArgument,
    key_file: Annotated[
        Path, typer.Option(help="File of the key that near sides have: openssl rand -hex 32.")
    ],
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="To listen at; port 0: a free one.")
    ] = "127.0.0.1:7800",
    tls_cert: Annotated[
        Path | None, typer.Option(help="Certificate to show, PEM.  [default: no encryption]")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its private key, PEM.")] = None,
    max_num_seqs: MaxNumSeqsOption = 16,
    idle_timeout: Annotated[
        float, typer.Option(min=1, help="Seconds after which a silent connection is ended.")
    ] = 600,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    context_tokens: ContextOption = None,
    target: TargetOption = None,
    tensor_parallel: TensorParallelOption = None,
) -> None:
    """Serve a chain's target to `--remote` of other commands. SIGTERM or Ctrl-C ends it.

    The other members run where the answers are wanted; their weights need not be here.
    """
    if (tls_cert is None) != (tls_key is None):
        raise UserError(
            "half of a certificate", "--tls-cert and --tls-key", "give both of them, or neither"
        )
    from polybasic.deploy.runtime.load import load_target
    from polybasic.deploy.runtime.remote.keys import read_key, server_tls
    from polybasic.deploy.runtime.remote.server import TargetServer, listening_at

    key = read_key(key_file)
    tls = None if tls_cert is None or tls_key is None else server_tls(tls_cert, tls_key)
    listening = listening_at(listen)
    options: dict[str, Any] = {"dtype": dtype, "context_tokens": context_tokens, "say": say}
    options |= {"sequences": max_num_seqs, "device": device, "tensor_parallel": tensor_parallel}
    loaded = load_target(chain, target=target, **options)
    server = TargetServer(loaded, key, listening, tls, idle_timeout, say)
    host, port = listening.getsockname()[:2]
    say(_about(loaded, f"{host}:{port}", tls is not None))
    try:
        server.run()
    except KeyboardInterrupt:
        say("ended; answers under way can go on where it is started again")
    finally:
        server.close()


def _about(chain: "Chain", address: str, is_encrypted: bool) -> str:
    memory = chain.memory
    return (
        f"target of {chain.folder}: {memory.shown}, for "
        f"{memory.sequences} answers at a time of {memory.context_tokens} tokens\n"
        f"listening at {address}, {'with TLS' if is_encrypted else 'not encrypted'}"
    )
