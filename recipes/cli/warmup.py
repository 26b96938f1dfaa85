"""The command that prepares a machine for a chain: warmup."""

import json
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polybasic.chain.base.readable import counted, readable_bytes
from polybasic.chain.base.terminal import say
from polybasic.recipes.cli.chain import ChainArgument, JsonOption
from polybasic.recipes.cli.shared.options import (
    ContextOption,
    DeviceOption,
    DtypeOption,
    NoGraphsOption,
    SmallOption,
    TargetOption,
    as_named,
    with_small,
)

if TYPE_CHECKING:
    from polybasic.deploy import Chain

_QUESTION = "Explain in a few sentences how a letter travels from one town to another. "
_NUM_PROMPT_TOKENS, _NUM_NEW_TOKENS = 300, 32


def warmup(
    chain: ChainArgument,
    small: SmallOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    context_tokens: ContextOption = None,
    max_num_seqs: Annotated[
        int | None,
        typer.Option(
            min=1, help="Answers at a time, as `serve` will be asked for.", show_default=False
        ),
    ] = None,
    no_graphs: NoGraphsOption = False,
    target: TargetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compile, choose and time what is lacking for a chain here.

    Loads the chain and answers twice with each set of members that a plan of it names, and with the
    target alone. What is made lies in the cache folder, from which later processes take it; CUDA
    graphs are captured by each process anew.
    """
    from polybasic.chain.kernels.cached import cached
    from polybasic.deploy import load_chain

    begun = time.monotonic()
    named = as_named(chain, small)
    say(f"warming up {named}: compiles, chooses and times what this machine lacks")
    loaded = load_chain(
        with_small(chain, small),
        device=device,
        dtype=dtype,
        context_tokens=context_tokens,
        sequences=max_num_seqs,
        graphs=not no_graphs,
        target=target,
        say=say,
    )
    steps = [{"step": "load", "seconds": time.monotonic() - begun}]
    with loaded:
        for members in _sets_of_members(loaded):
            name = " → ".join(members)
            for time_ in ("first", "second"):
                seconds = _answer_seconds(loaded, members)
                steps.append({"step": f"{time_} answer of {name}", "seconds": seconds})
    found = cached()
    seconds, num_files = time.monotonic() - begun, sum(kind.num_files for kind in found)
    if as_json:
        typer.echo(json.dumps({"steps": steps, "seconds": seconds, "num_cached_files": num_files}))
    else:
        for step in steps:
            typer.echo(f"{step['seconds']:8.2f} s  {step['step']}")
    kept = readable_bytes(sum(kind.num_bytes for kind in found))
    say(
        f"warm after {seconds:.1f} s; {counted(num_files, 'file')} ({kept}) in the cache folder; "
        f"next: polybasic serve {named}"
    )


def _sets_of_members(chain: "Chain") -> list[tuple[str, ...]]:
    """Those of the plan that runs, of the packed one, and the target alone; each once."""
    target = chain.manifest.members[0].name
    return list(dict.fromkeys([chain.plan.members, chain.manifest.plan.members, (target,)]))


def _answer_seconds(chain: "Chain", members: tuple[str, ...]) -> float:
    """Of a greedy answer to a prompt that is longer than what is read at a time."""
    from polybasic.deploy.runtime.sources import with_start

    num_tokens = min(_NUM_PROMPT_TOKENS, chain.memory.context_tokens - _NUM_NEW_TOKENS)
    token_ids: list[int] = chain.tokenizer.encode(_QUESTION)
    prompt = (token_ids * (num_tokens // len(token_ids) + 1))[: max(num_tokens, 2)]
    if (encoder := chain.engine.models.encoder) is not None:
        prompt = with_start(prompt[:-1], encoder)
    options: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "members": list(members)}
    begun = time.monotonic()
    chain.generate(prompt, max_new_tokens=_NUM_NEW_TOKENS, **options)
    return time.monotonic() - begun
