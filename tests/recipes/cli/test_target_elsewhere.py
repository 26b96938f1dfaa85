"""`--target PATH`: where the target of a chain lies that was packed without it."""

from pathlib import Path

import typer.main

from polybasic.recipes.cli import main as cli
from tests.conftest import ChainParts
from tests.recipes.command_line import call, refusal


def test_every_command_on_a_chain_takes_a_target_from_where_it_lies(
    tiny_chain_parts: ChainParts, tmp_path: Path
) -> None:
    commands = typer.main.get_command(cli.app).commands  # type: ignore[attr-defined]
    options = {
        name: {
            option for parameter in command.params for option in (parameter.name, *parameter.opts)
        }
        for name, command in commands.items()
    }
    reading = {name for name, names in options.items() if "chain" in names}
    without = {name for name in reading if "--target" not in options[name]}
    assert without == {"migrate", "forget"}
    chain = tmp_path / "chain"
    tiny_chain_parts.package(chain, copy_target=False)
    target = tiny_chain_parts.target.rename(tmp_path / "elsewhere")
    for asked in (
        ["verify"],
        ["generate", "-p", "w1", "--max-new-tokens", 2, "--dtype", "float32"],
        ["trace", "-p", "w1", "--max-new-tokens", 2, "--dtype", "float32"],
        ["export", "--to", "eagle", "--out", tmp_path / "exported"],
    ):
        command = [asked[0], chain, *asked[1:]]
        assert "target is not there: " in refusal(*command)
        code, _, said = call(*command, "--target", target)
        assert code == 0, said
