"""Options of the commands that ask a chain something."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from polybasic.chain.base.errors import UserError

MaxNewTokensOption = Annotated[int, typer.Option(help="Tokens of the answer at most.")]
TemperatureOption = Annotated[
    float | None,
    typer.Option(help="0 is greedy.  [default: this and others: the checkpoint's own]"),
]
TopKOption = Annotated[
    int | None, typer.Option(help="Sample among this many likeliest tokens; 0: all.")
]
TopPOption = Annotated[
    float | None,
    typer.Option(help="Sample among the likeliest tokens that together have this probability."),
]
MinPOption = Annotated[
    float | None,
    typer.Option(help="Least probability of a token, as a share of the likeliest one's."),
]
RepetitionPenaltyOption = Annotated[
    float | None,
    typer.Option(help="Divides the logits of tokens that prompt or answer hold; 1: off."),
]
PresencePenaltyOption = Annotated[
    float | None, typer.Option(help="Subtracted from the logits of tokens that the answer holds.")
]
FrequencyPenaltyOption = Annotated[
    float | None, typer.Option(help="Subtracted for each time that a token is in the answer.")
]
PromptOption = Annotated[
    str | None,
    typer.Option(
        "-p",
        "--prompt",
        help="What the user says; - reads standard input.  [default: standard input, if piped]",
    ),
]
MessagesOption = Annotated[
    Path | None,
    typer.Option("-f", "--file", help="Messages with role and content, as JSON."),
]
JsonSchemaOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="The answer is JSON of this schema."),
]
RegexOption = Annotated[
    str | None, typer.Option(help="The whole answer matches this regular expression.")
]
ChoiceOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="TEXT", help="The answer is this text, or one of several; may be repeated."
    ),
]
GrammarOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="The answer follows this grammar, in Lark's syntax."),
]
SeedOption = Annotated[
    int | None,
    typer.Option(help="Of sampling: the same seed gives the same text.  [default: a random one]"),
]
RuleOption = Annotated[
    str | None,
    typer.Option(
        help="How tokens are drawn: coupled, block or token.  "
        "[default: coupled if a seed is given, else the plan's]"
    ),
]
StopOption = Annotated[
    list[str] | None,
    typer.Option(metavar="TEXT", help="Text that ends the answer; may be repeated."),
]
MembersOption = Annotated[
    str | None, typer.Option(help="Names, separated by commas.  [default: the plan's]")
]
MaxNumSeqsOption = Annotated[
    int, typer.Option(min=1, help="Answers at a time, each with caches of its own.")
]
DeviceOption = Annotated[
    str | None, typer.Option(help="cpu or cuda.  [default: cuda if there is one]")
]
DtypeOption = Annotated[
    str | None,
    typer.Option(help="bfloat16, float16 or float32.  [default: as stored, if fast here]"),
]


def _num_parts(context: typer.Context, given: int | None) -> int:
    """Processes that models are divided among; but for the first of a launcher's they stay here."""
    from polybasic.chain.base.processes.place import place_in

    if place_in().world_size == 1:
        return given or 1
    from polybasic.deploy.runtime.parallel.processes import join_launched, leave_launched

    context.call_on_close(leave_launched)
    return join_launched(given)


TensorParallelOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=64,
        callback=_num_parts,
        is_eager=True,
        help="Processes that target and intermediate are divided among, a GPU each.  "
        "[default: 1, or as many as a launcher has started]",
    ),
]
ContextOption = Annotated[
    int | None,
    typer.Option(
        help="Most tokens of prompt and answer together.  "
        "[default: what the models are made for, at most 8192]"
    ),
]
NoGraphsOption = Annotated[
    bool,
    typer.Option(
        "--no-graphs",
        help="On a GPU, launch every kernel by itself, without CUDA graphs; same outputs, slower.",
    ),
]
TargetOption = Annotated[
    str | None,
    typer.Option(
        metavar="PATH",
        help="Folder or hub id of the chain's target.  [default: where the chain says]",
    ),
]
RemoteOption = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        help="Where `polybasic serve-target` serves this chain's target, which is not loaded here.",
    ),
]
KeyFileOption = Annotated[
    str | None, typer.Option(help="With --remote: the file of the key that its server has.")
]
TlsCertificateOption = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="With --remote: the server's certificate, or that of its authority.  "
        "[default: no encryption]",
    ),
]
WaitOption = Annotated[
    bool,
    typer.Option(
        "--no-optimism",
        help="With --remote: wait for each answer, rather than go on as if it were as expected.",
    ),
]


_OF_RECIPE = ("dtype", "temperature", "max_new_tokens", "rule")
"""Settings whose defaults are those of the recipe that a chain was made by."""


SmallOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="MODEL",
        help="For a model without a chain: a smaller one with the same tokenizer, which drafts, in "
        "4 bits where its weights take more than 5; several from the larger to the smaller.",
    ),
]


def with_small(chain: str, small: Sequence[str] | None) -> str:
    """The chain that is named, or that of the model and the smaller ones beside it.

    Raises:
        UserError: as `polybasic.recipes.pipeline.beside.chain_beside`.
    """
    if not small:
        return chain
    from polybasic.recipes.pipeline.beside import chain_beside

    return str(chain_beside(chain, small))


def as_named(chain: str, small: Sequence[str] | None) -> str:
    """What a command was told of a chain, for the next one's command line."""
    return shlex.join([chain, *(word for model in small or () for word in ("--small", model))])


def first_given(**options: object) -> str | None:
    """The first option that was given, as the command line has it without its dashes."""
    return next((name.replace("_", "-") for name, value in options.items() if value), None)


def recipe_defaults(chain: Path, section: str) -> dict[str, Any]:
    """What a chain's recipe says of them in a section, unchecked; empty where it says nothing."""
    from polybasic.chain.formats.manifest import read_manifest

    settings = read_manifest(chain).provenance.recipe.get(section) or {}
    return {key: settings[key] for key in _OF_RECIPE if key in settings}


def remote_options(
    remote: str | None, key_file: str | None, tls_certificate: str | None, no_optimism: bool
) -> dict[str, Any]:
    """What `load_chain` is given of a target that runs elsewhere.

    Raises:
        UserError: options of a remote target without its address.
    """
    if remote is None:
        given = {"--key-file": key_file, "--tls-certificate": tls_certificate}
        if named := [name for name, value in given.items() if value is not None]:
            raise UserError("no remote target", " ".join(named), "name it with --remote HOST:PORT")
        return {}
    return {
        "remote": remote,
        "key_file": key_file,
        "tls_certificate": tls_certificate,
        "optimistic": not no_optimism,
    }
