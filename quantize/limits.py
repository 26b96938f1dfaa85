"""Which models get a 4-bit copy, and in which groups of inputs. No torch in here."""

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.checkpoints.block_types import GROUP
from polybasic.chain.formats.checkpoints.config import ConfigFile
from polybasic.chain.formats.checkpoints.names import linear_shapes
from polybasic.chain.formats.checkpoints.quantization import GROUP_SIZES, largest_group_size
from polybasic.chain.formats.families.table import FAMILIES
from polybasic.quantize.settings import GroupSize, QuantizeSettings

_OUT_MULTIPLE = 32  # for autoawq's packing; the format itself needs a multiple of 8


def check_quantizable(target: ConfigFile, settings: QuantizeSettings) -> int:
    """Refuse what AWQ cannot make a copy of, by the config alone.

    Args:
        target: the model's config.
        settings: of the recipe.

    Returns:
        The group size of the copy, as `group_size_of`.

    Raises:
        UserError: an unsupported or quantized model, calibration samples beyond its context, or
            linears that do not divide into groups.
    """
    if target.in_4_bits:
        raise UserError(
            "target is quantized already",
            f"quantization_config in {target.path}",
            "name the unquantized checkpoint",
        )
    model_type = target.content.get("model_type")
    family = FAMILIES.get(model_type or "")
    if family is None or family.autoawq is None:
        raise UserError(
            "unsupported architecture",
            f"model_type {model_type!r} in {target.path}",
            "quantizing supports "
            + ", ".join(name for name, known in FAMILIES.items() if known.autoawq),
        )
    check_context(
        target, "calibration samples", "quantize.calibration_tokens", settings.calibration_tokens
    )
    return group_size_of(target, settings.group_size)


def check_context(target: ConfigFile, what: str, key: str, num_tokens: int) -> None:
    """Refuse rows that are longer than a model's context.

    Args:
        target: the model's config.
        what: the rows, for people.
        key: the setting that says how long they are.
        num_tokens: its value.

    Raises:
        UserError: they are.
    """
    context_tokens = target.content.get("max_position_embeddings", num_tokens)
    if num_tokens > context_tokens:
        raise UserError(
            f"{what} exceed the context",
            f"{key} {num_tokens}, {target.path} has max_position_embeddings {context_tokens}",
            f"lower {key}",
        )


def check_rows(target: ConfigFile) -> None:
    """Refuse a model whose matrices do not divide into blocks of Q4_0.

    Raises:
        UserError: the first that has rows which are no multiple of `GROUP` long, or an
            encoder-decoder, whose products read no blocks.
    """
    if target.decoder.encoder is not None:
        raise UserError(
            "an encoder-decoder gets no copy in few bits",
            f"{target.path}",
            "leave it as it is: small.quantize=false",
        )
    for name, (out_size, in_size) in linear_shapes(target.decoder).items():
        if in_size % GROUP:
            raise UserError(
                "matrix without whole blocks",
                f"{name}.weight [{out_size}, {in_size}] of each layer of {target.folder}: rows "
                f"are no multiple of {GROUP} long",
                "leave the model out, or name another one",
            )


def group_size_of(target: ConfigFile, wanted: GroupSize = "auto") -> int:
    """Inputs that share a scale in a model's 4-bit copy: one number for all its linears.

    Args:
        target: the model's config.
        wanted: "auto" for the largest that divides the inputs of all linears.

    Raises:
        UserError: a linear that does not divide into groups, or whose outputs cannot be packed.
    """
    linears = linear_shapes(target.decoder)
    largest = largest_group_size(in_size for _, in_size in linears.values())
    size = (largest or min(GROUP_SIZES)) if wanted == "auto" else wanted
    for name, (out_size, in_size) in linears.items():
        if in_size % size or out_size % _OUT_MULTIPLE:
            raise UserError(
                "linear does not divide into groups",
                f"{name}.weight [{out_size}, {in_size}] of each layer of {target.folder}",
                f"out must be a multiple of {_OUT_MULTIPLE} and in of {size}"
                + ("" if wanted == "auto" or not largest else "; quantize.group_size=auto"),
            )
    return size
