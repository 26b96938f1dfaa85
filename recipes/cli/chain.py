"""Commands on a finished chain: generate, inspect, verify."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from polybasic.chain.base.errors import UserError
from polybasic.chain.base.readable import counted
from polybasic.chain.base.terminal import as_it_is, say
from polybasic.recipes.cli.shared.asked import AnswerFile, check_sources, grammar_asked, one_prompt
from polybasic.recipes.cli.shared.lossy import PlanFileOption, plan_in
from polybasic.recipes.cli.shared.options import (
    ChoiceOption,
    ContextOption,
    FrequencyPenaltyOption,
    GrammarOption,
    JsonSchemaOption,
    KeyFileOption,
    MembersOption,
    MessagesOption,
    MinPOption,
    NoGraphsOption,
    PresencePenaltyOption,
    PromptOption,
    RegexOption,
    RemoteOption,
    RepetitionPenaltyOption,
    RuleOption,
    SeedOption,
    SmallOption,
    StopOption,
    TargetOption,
    TensorParallelOption,
    TlsCertificateOption,
    TopKOption,
    TopPOption,
    WaitOption,
    as_named,
    recipe_defaults,
    remote_options,
    with_small,
)
from polybasic.recipes.cli.shared.repeated import checked_rule, compare_with_target

if TYPE_CHECKING:
    from polybasic.deploy import Chain, Generation, Statistics

ChainArgument = Annotated[
    str,
    typer.Argument(
        metavar="CHAIN",
        help="A chain, or a model: a folder, a hub id org/name[@revision], a GGUF file.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print only JSON on stdout.")]


def generate(
    chain: ChainArgument,
    small: SmallOption = None,
    prompt: PromptOption = None,
    file: MessagesOption = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help="Answer a file of prompts, an object a line; with --out."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Where their answers go; continued after an interruption."),
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            help="Tokens of the answer at most.  [default: plan.max_new_tokens of the chain's "
            "recipe, else 256]"
        ),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            help="0 is greedy.  [default: plan.temperature of the chain's recipe, else the "
            "checkpoint's own, as those below]"
        ),
    ] = None,
    top_k: TopKOption = None,
    top_p: TopPOption = None,
    min_p: MinPOption = None,
    repetition_penalty: RepetitionPenaltyOption = None,
    presence_penalty: PresencePenaltyOption = None,
    frequency_penalty: FrequencyPenaltyOption = None,
    logit_bias: Annotated[
        list[str] | None,
        typer.Option(metavar="ID=VALUE", help="Added to a token's logit; may be repeated."),
    ] = None,
    seed: SeedOption = None,
    rule: RuleOption = None,
    stop: StopOption = None,
    json_schema: JsonSchemaOption = None,
    regex: RegexOption = None,
    choice: ChoiceOption = None,
    grammar: GrammarOption = None,
    members: MembersOption = None,
    plan: PlanFileOption = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="bfloat16, float16 or float32.  [default: plan.dtype of the chain's recipe, else "
            "as stored, if fast here]"
        ),
    ] = None,
    context_tokens: ContextOption = None,
    no_graphs: NoGraphsOption = False,
    target: TargetOption = None,
    remote: RemoteOption = None,
    key_file: KeyFileOption = None,
    tls_certificate: TlsCertificateOption = None,
    no_optimism: WaitOption = False,
    tensor_parallel: TensorParallelOption = None,
    as_json: JsonOption = False,
    no_stream: Annotated[bool, typer.Option("--no-stream", help="Print the answer whole.")] = False,
    verify: Annotated[
        bool,
        typer.Option("--verify", help="Let the target alone answer as well, and compare."),
    ] = False,
) -> None:
    """Answer a prompt, or a file of prompts.

    The text goes to stdout, statistics to stderr. A terminal shows control characters as escapes;
    files and pipes get them as they are.
    """
    from polybasic.chain.formats.chains import resolve_chain
    from polybasic.deploy import load_chain
    from polybasic.deploy.planner.settings import PlanSettings
    from polybasic.deploy.runtime.rounds.sampling import Sampling
    from polybasic.recipes.schema.loading import validated

    check_sources(prompt, file, prompts, out)
    settings: dict[str, Any] = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "logit_bias": _logit_bias(logit_bias or []) or None,
        "seed": seed,
    }
    settings = {name: value for name, value in settings.items() if value is not None}
    Sampling(**settings)  # refused before anything is loaded
    rule = checked_rule(rule, verify)
    reference, chain = chain, with_small(chain, small)
    of_recipe = recipe_defaults(resolve_chain(chain), "plan")
    planned = validated(PlanSettings, of_recipe, {}, f"the recipe of {chain}")
    by_recipe = "temperature" in of_recipe and temperature is None
    if by_recipe:
        settings["temperature"] = planned.temperature
    if max_new_tokens is None:
        max_new_tokens = planned.max_new_tokens if "max_new_tokens" in of_recipe else 256
    options: dict[str, Any] = {
        **settings,
        "max_new_tokens": max_new_tokens,
        "stop": stop or [],
        "members": members.split(",") if members is not None else None,
        "rule": rule,
    }
    run_by = plan_in(plan)
    matched = grammar_asked(json_schema, regex, choice or [], grammar)
    answers, question = None, None
    if prompts is not None and out is not None:
        shown = {"--json": as_json, "--no-stream": no_stream, "--verify": verify}
        if named := [name for name, is_given in shown.items() if is_given]:
            raise UserError("of a single answer", named[0], "leave it out beside --prompts")
        held_to: dict[str, Any] = {} if matched is None else {"grammar": matched.text}
        if run_by is not None:
            held_to["plan"] = run_by.model_dump(mode="json")
        answers = AnswerFile(prompts, out, {"chain": chain, **options, **held_to})
    else:
        question = one_prompt(prompt, file)
    options["grammar"] = matched
    loaded = load_chain(
        chain,
        dtype=planned.dtype if dtype is None else dtype,
        context_tokens=context_tokens,
        graphs=not no_graphs,
        tensor_parallel=tensor_parallel,
        target=target,
        say=say,
        plan=run_by,
        **remote_options(remote, key_file, tls_certificate, no_optimism),
    )
    note_bare(loaded, as_named(reference, small))
    if answers is not None:
        say(f"answered {counted(answers.complete(loaded, options), 'prompt')}; wrote {out}")
        return
    assert question is not None
    if as_json or no_stream:
        answer = loaded.generate(question, **options)
        content = json.dumps(_as_json(answer), ensure_ascii=False) if as_json else answer.text
        print(content, file=answer_stream())
        statistics, token_ids = answer.statistics, answer.token_ids
    else:
        stream = loaded.stream(question, **options)
        token_ids = []
        for piece in stream:
            print(piece.text, end="", flush=True, file=answer_stream())
            token_ids += piece.token_ids
        print()
        statistics = stream.statistics
    defaults = {
        name: value
        for name, value in loaded.sampling(**settings).in_effect.items()
        if name not in settings
    }
    sources = _shown_defaults(defaults)
    if by_recipe and loaded.default_sampling.temperature != planned.temperature:
        sources = f"; by the chain's recipe: temperature {planned.temperature:g}{sources}"
    say(statistics_line(statistics) + sources)
    if verify:
        sampling = loaded.sampling(**settings | {"seed": statistics.seed})
        line, is_well = compare_with_target(loaded, question, options, sampling, token_ids)
        say(line)
        if not is_well:
            raise typer.Exit(1)


def inspect(
    chain: ChainArgument,
    small: SmallOption = None,
    memory: Annotated[
        bool,
        typer.Option("--memory", help="State what it will take on this machine, in seconds."),
    ] = False,
    dtype: Annotated[
        str | None, typer.Option(help="To state the memory for.  [default: as the target's]")
    ] = None,
    context_tokens: ContextOption = None,
    target: TargetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print members, plan, origin, results and memory of a chain."""
    from polybasic.chain.base.console import Console
    from polybasic.chain.formats.chains import resolve_chain
    from polybasic.chain.formats.describe import describe_chain, print_chain

    folder = resolve_chain(with_small(chain, small))
    description = describe_chain(folder)
    if not as_json:
        print_chain(description, Console())
    stated = None
    if memory or dtype is not None or context_tokens is not None:
        stated = _stated_memory(folder, dtype, context_tokens, target)
    elif not as_json:
        say(f"next: polybasic inspect {as_named(chain, small)} --memory")
    if as_json:
        typer.echo(json.dumps(description | {"memory": stated}, ensure_ascii=False))
    elif stated is not None:
        from polybasic.deploy.bench.report.lines import stated_memory_line

        say(f"memory: {stated_memory_line(stated)}", sys.stdout)


def _stated_memory(
    folder: Path, dtype: str | None, context_tokens: int | None, target: str | None
) -> dict[str, Any] | None:
    """What the chain will take; None, with the reason on stderr, where that is unknown."""
    from polybasic.chain.formats.manifest import read_manifest
    from polybasic.chain.formats.verify import check_chain
    from polybasic.recipes.estimates.sizes import has_weights

    for member in read_manifest(folder).members if target is None else ():
        source, revision = member.reference.source, member.reference.revision
        if member.reference.path is None and source and not source.startswith((".", "/")):
            model = f"{source}@{revision}" if revision else source
            if not has_weights(model):
                say(f"memory: not stated, {member.name} ({model}) is not on this machine yet")
                return None
    try:
        checked = check_chain(folder, digests=False, target=target)
    except UserError as error:
        say(f"memory: not stated, {error}")
        return None
    from polybasic.deploy.runtime.load import stated_memory
    from polybasic.deploy.runtime.options import LoadOptions

    options = LoadOptions(dtype=dtype, context_tokens=context_tokens)
    memory, available = stated_memory(checked, options)
    return memory.to_json() | {"available_bytes": available}


def verify(chain: ChainArgument, small: SmallOption = None, target: TargetOption = None) -> None:
    """Check every file of a chain against its manifest."""
    from polybasic.chain.formats.chains import resolve_chain
    from polybasic.chain.formats.verify import check_chain

    checked = check_chain(resolve_chain(with_small(chain, small)), target=target)
    for warning in checked.warnings:
        say(f"warning: {warning}")
    num_files = sum(len(member.files) for member in checked.manifest.members)
    typer.echo(
        f"{checked.folder}: whole; {counted(len(checked.manifest.members), 'member')}, "
        f"{counted(num_files + len(checked.manifest.tokenizer.files), 'file')} checked"
    )
    say(f"next: polybasic generate {as_named(chain, small)} -p 'Hello'")


def answer_stream() -> TextIO:
    """Where an answer goes: to a terminal escaped, to a file or another program as it is."""
    return sys.stdout if sys.stdout.isatty() else as_it_is(sys.stdout)


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


def statistics_line(statistics: "Statistics") -> str:
    passes = ", ".join(f"{name} {num}" for name, num in statistics.forward_passes.items())
    last = "" if statistics.seed is None else f"; seed {statistics.seed}"
    if statistics.num_tolerated is not None:
        strange = counted(statistics.num_tolerated, "token")
        last = f"; lossy: {strange} not the target's own"
    return (
        f"{counted(statistics.num_tokens, 'token')} in {statistics.seconds:.2f} s "
        f"({statistics.tokens_per_second:.1f} tokens/s), "
        f"{statistics.mean_accepted_length:.2f} tokens per target pass; "
        f"forward passes: {passes}{last}"
    )


def _shown_defaults(defaults: dict[str, Any]) -> str:
    if not defaults:
        return ""
    shown = ", ".join(f"{name} {value}" for name, value in defaults.items())
    return f"; by the checkpoint's generation_config.json: {shown}"


def _logit_bias(given: list[str]) -> dict[int, float]:
    """["42=-5"] -> {42: -5.0}."""
    biases: dict[int, float] = {}
    for pair in given:
        token, _, bias = pair.partition("=")
        try:
            biases[int(token)] = float(bias)
        except ValueError as error:
            raise UserError(
                "malformed logit bias", f"--logit-bias {pair}", "write ID=VALUE, as in 42=-5"
            ) from error
    if len(biases) < len(given):
        raise UserError(
            "token named twice", f"--logit-bias {' '.join(given)}", "give one value for each id"
        )
    return biases


def note_bare(loaded: "Chain", named: str) -> None:
    """Say how to make a model alone faster that runs as it was packed.

    Args:
        named: the chain, as the user gave it.
    """
    from polybasic.chain.formats.bare import is_bare

    if is_bare(loaded.manifest) and loaded.plan == loaded.manifest.plan:
        say(
            "no plan was measured on this machine yet; two minutes find what is fastest here; "
            f"next: polybasic plan {named}"
        )
