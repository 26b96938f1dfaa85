"""The command that makes a large chain of a small one: grow."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from polybasic.recipes.cli.chain import ChainArgument, note
from polybasic.recipes.cli.options import TargetOption

if TYPE_CHECKING:
    from polybasic.recipes.growth.shapes import GrownShape


def grow(
    chain: ChainArgument,
    shape: Annotated[str, typer.Argument(metavar="SHAPE", help="cpu-100m, gpu-7b or gpu-8b.")],
    out: Annotated[
        Path | None, typer.Option(help="Folder to write.  [default: CHAIN-SHAPE]")
    ] = None,
    target: TargetOption = None,
) -> None:
    """Write a chain that answers as CHAIN does and costs what a large model's does."""
    from polybasic.chain.formats.chains import resolve_chain
    from polybasic.chain.formats.files import disk_errors
    from polybasic.recipes.growth.chain import grow_chain
    from polybasic.recipes.growth.shapes import shape_named
    from polybasic.recipes.pipeline.disk import check_free, full_disk_is_an_oserror

    wanted = shape_named(shape)
    folder = resolve_chain(chain)
    if out is None:
        is_local = Path(chain).expanduser().exists()
        name = f"{folder.resolve().name if is_local else chain.split('/')[-1]}-{shape}"
        out = folder.resolve().with_name(name) if is_local else Path(name)
    needed_bytes = _num_bytes(folder, wanted, target)
    check_free(out, needed_bytes)
    note(f"growing {folder} to {shape}: about {needed_bytes / 1e9:.1f} GB into {out}")
    with disk_errors(out), full_disk_is_an_oserror(out):
        grow_chain(folder, wanted, shape, out, target=target)
    typer.echo(str(out))
    written = shlex.quote(str(out))
    note(f"wrote {out}; next: polybasic plan {written}, then polybasic bench {written}")


def _num_bytes(folder: Path, shape: "GrownShape", target: str | None = None) -> int:
    """Of a chain's members in the grown shapes."""
    from polybasic.chain.formats.quantization import GROUP_SIZE
    from polybasic.chain.formats.verify import check_chain
    from polybasic.recipes.estimates.sizes import grown_shape

    chain = check_chain(folder, digests=False, target=target)
    members = chain.manifest.members
    weight_bytes = 4 if members[0].dtype == "float32" else 2
    vocab_size = chain.target_config.decoder.vocab_size
    packed = (chain.configs[member.name].group_size for member in members)
    group_size = min((size for size in packed if size), default=GROUP_SIZE)
    grown = grown_shape(shape, vocab_size, weight_bytes, group_size)
    of_kind = {
        "decoder": grown.num_bytes,
        "awq": grown.num_int4_bytes,
        "eagle2": grown.num_draft_bytes,
    }
    return sum(of_kind[member.kind] for member in members)
