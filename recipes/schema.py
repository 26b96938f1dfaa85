"""What a recipe may say: the one schema behind files, overrides, docs and `recipes schema`."""

from typing import Self

from pydantic import Field, model_validator

from polybasic.chain.errors import UserError
from polybasic.chain.settings import Settings
from polybasic.deploy.settings import BenchSettings, PlanSettings
from polybasic.quantize.settings import QuantizeSettings
from polybasic.train.settings import DataSettings, HeadSettings, ScratchSettings


class TargetSettings(Settings):
    """The model whose distribution the chain keeps."""

    model: str = Field(
        "scratch",
        description="'scratch' (trained from the conversations), a folder or a hub id[@revision]",
    )
    scratch: ScratchSettings = Field(
        ScratchSettings(), description="shape and training of a 'scratch' target"
    )


class PackageSettings(Settings):
    """How the chain folder is put together."""

    copy_target: bool = Field(
        False, description="copy the target into the chain instead of referring to it"
    )


class Recipe(Settings):
    """Everything that `polybasic run` needs: one section a stage."""

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="names the output folder: runs/<name>"
    )
    description: str = Field("", description="one line for `polybasic recipes ls`")
    seed: int = Field(0, ge=0, lt=2**32, description="of everything that is drawn at random")
    target: TargetSettings = Field(TargetSettings(), description="the model to accelerate")
    data: DataSettings = Field(DataSettings(), description="conversations to learn from")
    train: HeadSettings = Field(HeadSettings(), description="the draft head")
    quantize: QuantizeSettings = Field(
        QuantizeSettings(), description="the 4-bit intermediate, made from the target"
    )
    package: PackageSettings = Field(PackageSettings(), description="the chain folder")
    plan: PlanSettings = Field(PlanSettings(), description="tree and flush length of the chain")
    bench: BenchSettings = Field(BenchSettings(), description="the report at the end")

    @model_validator(mode="after")
    def _sections_agree(self) -> Self:
        if "target" not in self.bench.systems:
            raise UserError(
                "no baseline",
                f"bench.systems = {', '.join(self.bench.systems) or 'empty'}",
                "add target, over which speedups are counted",
            )
        if self.target.model == "scratch":
            self._scratch_target_can_be_built()
        return self

    def _scratch_target_can_be_built(self) -> None:
        scratch, where = self.target.scratch, "target.scratch"
        for divided, divisor in (
            ("hidden_size", "num_heads"),
            ("num_heads", "num_kv_heads"),
        ):
            top, bottom = getattr(scratch, divided), getattr(scratch, divisor)
            if top % bottom:
                raise UserError(
                    f"{divided} is not a multiple of {divisor}",
                    f"{where}.{divided} = {top}, {where}.{divisor} = {bottom}",
                    "change one of them",
                )
        if scratch.hidden_size // scratch.num_heads % 2:
            raise UserError(
                "heads of an odd size cannot be rotated",
                f"{where}.hidden_size = {scratch.hidden_size}, "
                f"{where}.num_heads = {scratch.num_heads}",
                "choose num_heads so that hidden_size / num_heads is even",
            )
        if self.data.max_tokens > scratch.context_tokens:
            raise UserError(
                "conversations are longer than the target's context",
                f"data.max_tokens = {self.data.max_tokens}, "
                f"{where}.context_tokens = {scratch.context_tokens}",
                "lower the first or raise the second",
            )
        if self.bench.max_new_tokens >= scratch.context_tokens:
            raise UserError(
                "answers are longer than the target's context",
                f"bench.max_new_tokens = {self.bench.max_new_tokens}, "
                f"{where}.context_tokens = {scratch.context_tokens}",
                "lower the first or raise the second",
            )
