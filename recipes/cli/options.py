"""Options of the commands that ask a chain something."""

from typing import Annotated

import typer

MaxNewTokensOption = Annotated[int, typer.Option(help="Tokens of the answer at most.")]
TemperatureOption = Annotated[
    float | None,
    typer.Option(help="0 is greedy.  [default: this and others: the checkpoint's own]"),
]
TopKOption = Annotated[int | None, typer.Option(help="Sample among so many tokens; 0: all.")]
TopPOption = Annotated[float | None, typer.Option(help="Sample within so much probability.")]
MinPOption = Annotated[
    float | None, typer.Option(help="Least probability, over that of the likeliest token.")
]
RepetitionPenaltyOption = Annotated[
    float | None, typer.Option(help="Divides logits of tokens in prompt and answer; 1: off.")
]
PresencePenaltyOption = Annotated[
    float | None, typer.Option(help="Taken from logits of tokens in the answer.")
]
FrequencyPenaltyOption = Annotated[
    float | None, typer.Option(help="The same, for each time that they are in it.")
]
SeedOption = Annotated[
    int | None,
    typer.Option(help="Of the sampling: the same seed gives the same text.  [default: drawn]"),
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
DtypeOption = Annotated[
    str | None,
    typer.Option(help="bfloat16, float16 or float32.  [default: as stored, if fast here]"),
]
ContextOption = Annotated[
    int | None,
    typer.Option(
        help="Prompt and answer together, for which caches are allocated.  "
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
