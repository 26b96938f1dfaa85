"""`polybasic recipes`: list, read, copy, check."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    help="List, show, copy and check recipes.", no_args_is_help=True, rich_markup_mode=None
)
NameArgument = Annotated[
    str, typer.Argument(metavar="RECIPE", help="A recipe file, or the name of a shipped recipe.")
]


@app.command("ls")
def list_recipes(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the shipped recipes."""
    from polybasic.chain.base.console import Console
    from polybasic.chain.base.tables import Table, print_table
    from polybasic.recipes.schema.loading import load_recipe, shipped_recipes

    descriptions = {name: load_recipe(name).description for name in shipped_recipes()}
    if as_json:
        typer.echo(json.dumps(descriptions))
        return
    rows = [[name, description] for name, description in descriptions.items()]
    print_table(Table("", ["recipe", "about"], rows, wraps=True), Console())


@app.command()
def show(recipe: NameArgument) -> None:
    """Print a recipe with its comments, complete, whatever it is based on."""
    from polybasic.recipes.schema.layers import resolved_text
    from polybasic.recipes.schema.loading import read_layers

    typer.echo(resolved_text(read_layers(recipe)), nl=False)


@app.command("cp")
def copy(
    recipe: NameArgument,
    destination: Annotated[
        Path | None, typer.Argument(help="A file or folder.  [default: here]")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
) -> None:
    """Copy a recipe, complete, to be changed."""
    from polybasic.chain.base.errors import UserError
    from polybasic.chain.formats.files import whole_file
    from polybasic.recipes.schema.layers import resolved_text
    from polybasic.recipes.schema.loading import read_layers

    layers = read_layers(recipe)
    path = destination or Path()
    if path.is_dir():
        path = path / layers[0].path.name
    if path.exists() and not force:
        raise UserError("file exists", str(path), "name another one, or give --force")
    with whole_file(path) as partial:
        partial.write_text(resolved_text(layers), "utf-8")
    typer.echo(path)
    print(f"wrote {path}; next: polybasic run {path} --dry-run", file=sys.stderr)


@app.command()
def validate(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RECIPE]... [SECTION.KEY=VALUE]...",
            help="Recipe files or names, and values to change in them.  [default: all shipped]",
        ),
    ] = None,
) -> None:
    """Check keys and values of recipes; nothing is run."""
    from polybasic.recipes.schema.loading import load_recipe, shipped_recipes

    names = [argument for argument in arguments or [] if "=" not in argument]
    overrides = [argument for argument in arguments or [] if "=" in argument]
    for name in names or shipped_recipes():
        load_recipe(name, overrides)
        typer.echo(f"{name}: valid")


@app.command()
def schema() -> None:
    """Print the JSON schema of recipes, for editors."""
    from polybasic.recipes.schema.recipe import Recipe

    typer.echo(json.dumps(Recipe.model_json_schema(), indent=2))
