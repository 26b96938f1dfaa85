"""Commands on a finished chain: bench, generate, inspect, verify."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from polybasic.deploy import Generation, Statistics

ChainArgument = Annotated[
    str, typer.Argument(metavar="CHAIN", help="A chain's folder, or a hub id org/name[@revision].")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print only JSON on stdout.")]


def bench(
    chain: ChainArgument,
    prompts: Annotated[
        str | None,
        typer.Option(help="A Spec-Bench question file.  [default: embedded, held-out prompts]"),
    ] = None,
    num_prompts_per_task: Annotated[int | None, typer.Option(help="Prompts of each task.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(help="Tokens of one answer.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    repeats: Annotated[int | None, typer.Option(help="Turns that each system takes.")] = None,
    dtype: Annotated[str | None, typer.Option(help="bfloat16 or float32.")] = None,
    systems: Annotated[str | None, typer.Option(help="Names, separated by commas.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure the chain's systems side by side; writes its report."""
    from rich.console import Console

    from polybasic.chain.checkpoint import resolve_chain
    from polybasic.deploy.settings import BenchSettings
    from polybasic.recipes.loading import validated

    given: dict[str, Any] = {
        "prompts": prompts,
        "num_prompts_per_task": num_prompts_per_task,
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "repeats": repeats,
        "dtype": dtype,
        "systems": systems.split(",") if systems else None,
    }
    given = {key: value for key, value in given.items() if value is not None}
    settings = validated(BenchSettings, given, {}, "on the command line")
    folder = resolve_chain(chain)
    if settings.prompts == "embedded":
        path = _embedded_prompts(folder, settings.num_prompts_per_task)
        settings = settings.model_copy(update={"prompts": str(path)})
    from polybasic.deploy.benchmark import bench_chain
    from polybasic.deploy.report import print_report

    report = bench_chain(folder, settings)
    if as_json:
        typer.echo(json.dumps(report, ensure_ascii=False))
    else:
        print_report(report, Console())
    _note(f"wrote {folder / 'report' / 'report.md'}; next: polybasic inspect {chain}")


def generate(
    chain: ChainArgument,
    prompt: Annotated[str, typer.Option("-p", "--prompt", help="What the user says.")],
    max_new_tokens: Annotated[int, typer.Option(help="Tokens of the answer at most.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int | None, typer.Option(help="Sample among so many tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Sample within so much probability.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of the sampling.  [default: drawn]")] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="bfloat16, float16 or float32.  [default: as the target is stored]"),
    ] = None,
    as_json: JsonOption = False,
    no_stream: Annotated[bool, typer.Option("--no-stream", help="Print the answer whole.")] = False,
) -> None:
    """Answer a prompt: text on stdout, statistics on stderr."""
    from polybasic.deploy import load_chain

    loaded = load_chain(chain, dtype=dtype)
    options: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "seed": seed,
    }
    if as_json or no_stream:
        answer = loaded.generate(prompt, **options)
        content = json.dumps(_as_json(answer), ensure_ascii=False) if as_json else answer.text
        typer.echo(content)
    else:
        for piece in loaded.stream(prompt, **options):
            print(piece.text, end="", flush=True)
        print()
    assert loaded.last_statistics is not None
    _note(_statistics_line(loaded.last_statistics))


def inspect(chain: ChainArgument, as_json: JsonOption = False) -> None:
    """Print members, plan, origin and results of a chain."""
    from rich.console import Console

    from polybasic.chain.checkpoint import resolve_chain
    from polybasic.chain.describe import describe_chain, print_chain

    description = describe_chain(resolve_chain(chain))
    if as_json:
        typer.echo(json.dumps(description, ensure_ascii=False))
    else:
        print_chain(description, Console())


def verify(chain: ChainArgument) -> None:
    """Check every file of a chain against its manifest."""
    from polybasic.chain.checkpoint import resolve_chain
    from polybasic.chain.verify import check_chain

    checked = check_chain(resolve_chain(chain))
    num_files = sum(len(member.files) for member in checked.manifest.members)
    typer.echo(
        f"{checked.folder}: whole; {len(checked.manifest.members)} members, "
        f"{num_files + len(checked.manifest.tokenizer.files)} files checked"
    )
    _note(f"next: polybasic generate {chain} -p 'Hello'")


def _as_json(answer: "Generation") -> dict[str, Any]:
    return {
        "text": answer.text,
        "token_ids": answer.token_ids,
        "statistics": {
            **asdict(answer.statistics),
            "tokens_per_second": answer.statistics.tokens_per_second,
            "mean_accepted_length": answer.statistics.mean_accepted_length,
        },
    }


def _statistics_line(statistics: "Statistics") -> str:
    passes = ", ".join(f"{name} {num}" for name, num in statistics.forward_passes.items())
    return (
        f"{statistics.num_tokens} tokens in {statistics.seconds:.2f} s "
        f"({statistics.tokens_per_second:.1f} tokens/s), "
        f"{statistics.mean_accepted_length:.2f} tokens per target pass; forward passes: {passes}"
    )


def _embedded_prompts(folder: Path, num_per_task: int) -> Path:
    """Held-out prompts as the chain's own recipe draws them."""
    from polybasic.chain.manifest import read_manifest
    from polybasic.recipes.embedded.conversations import write_prompts

    path = folder / "report" / "prompts.jsonl"
    seed = read_manifest(folder).provenance.recipe.get("seed", 0)
    write_prompts(path, num_per_task, seed)
    return path


def _note(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
