"""What a recipe may say: the one schema behind files, overrides, docs and `recipes schema`."""

from typing import Any, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from polybasic.chain.base.errors import UserError
from polybasic.chain.base.settings import Seed, Settings
from polybasic.chain.formats.plan import Name
from polybasic.deploy.planner.settings import TASKS, BenchSettings, PlanSettings
from polybasic.quantize.settings import GroupSize, QuantizeSettings
from polybasic.train.settings import (
    TO_BE_GIVEN,
    DataSettings,
    DraftSettings,
    HeadSettings,
)

NUM_TASKS = len(TASKS)


def asks_heldout(prompts: str, conversations: str) -> bool:
    """Whether a section's `prompts` are first turns of held-out conversations.

    Args:
        prompts: of section plan or bench.
        conversations: of section data; "" where there are none.
    """
    return prompts == "heldout" or (prompts == "auto" and conversations != "")


class TargetSettings(Settings):
    """The model whose distribution the chain keeps."""

    model: str = Field(TO_BE_GIVEN, description="a folder, a hub id[@revision] or a GGUF file")
    weights: Literal["converted", "as_stored"] = Field(
        "converted",
        description="what the chain has of a GGUF file: its values in a type that every device "
        "multiplies, or its blocks, where `polybasic generate FILE` keeps them, too",
    )
    adapter: str | None = Field(
        None,
        min_length=1,
        description="folder or hub id[@revision] of a peft LoRA adapter of that model, which is "
        "merged into it",
    )
    chat_template: str | None = Field(
        None,
        min_length=1,
        description="a .jinja file or Jinja text, for a tokenizer without a chat template; it "
        "replaces the tokenizer's own",
    )


class SmallSettings(Settings):
    """A smaller model of the target's vocabulary, at the lower end of the chain."""

    model: str = Field(TO_BE_GIVEN, description="a folder, a hub id[@revision] or a GGUF file")
    role: Literal["intermediate", "drafter"] = Field(
        "intermediate",
        description="an intermediate verifies drafts and proposes to the member above it; a "
        "drafter drafts for every model of the chain, without a head",
    )
    quantize: bool = Field(True, description="to 4 bits, by the settings of section quantize")
    train_head: bool = Field(
        True,
        description="of an intermediate: a draft head of its own, by the settings of section train",
    )

    @property
    def has_head(self) -> bool:
        """Whether a draft head is trained for this model."""
        return self.role == "intermediate" and self.train_head


class PackageSettings(Settings):
    """How the chain folder is put together."""

    copy_target: Literal["auto", True, False] = Field(
        "auto",
        description="copy the target into the chain instead of referring to it; auto: unless it is "
        "the hub's, with hard links where the disk has them",
    )
    heads: dict[Name, str] = Field(
        {},
        description="further draft heads, folder or hub id by name; `polybasic plan` compares all "
        "drafters of a chain",
    )
    intermediates: dict[Name, str] = Field(
        {},
        description="further models of the target's vocabulary that verify, folder or hub id by "
        "name, below all others and from the larger to the smaller; they are taken as they are",
    )


def _tell_of_the_base(schema: dict[str, Any]) -> None:
    """A recipe's file may name another recipe, whose values it takes; a read recipe has none."""
    description = "the recipe that this one differs from: a shipped one, or a path from its folder"
    schema["properties"] = {
        "base": {"type": "string", "description": description},
        **schema["properties"],
    }


class Recipe(Settings):
    """Everything that `polybasic run` needs: one section a stage."""

    model_config = ConfigDict(json_schema_extra=_tell_of_the_base)

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        max_length=100,
        description="names the output folder: runs/<name>",
    )
    description: str = Field("", description="one line for `polybasic recipes ls`")
    seed: Seed = Field(0, description="of everything that is drawn at random")
    target: TargetSettings = Field(TargetSettings(), description="the model to accelerate")
    data: DataSettings = Field(DataSettings(), description="conversations to learn from")
    small: SmallSettings | None = Field(
        None, description="a smaller model below the 4-bit intermediate; null leaves it out"
    )
    draft: DraftSettings = Field(
        DraftSettings(), description="where the target's draft head comes from"
    )
    train: HeadSettings = Field(HeadSettings(), description="training of draft heads")
    quantize: QuantizeSettings | None = Field(
        QuantizeSettings(),
        description="the 4-bit intermediate, made from the target; null: none, and a smaller model "
        "is in blocks of 4 or 5 bits",
    )
    package: PackageSettings = Field(PackageSettings(), description="the chain folder")
    plan: PlanSettings = Field(PlanSettings(), description="tree and block length of the chain")
    bench: BenchSettings = Field(BenchSettings(), description="the report at the end")

    @model_validator(mode="after")
    def _weights_fit(self) -> Self:
        others = {"target.adapter": self.target.adapter, "quantize": self.quantize}
        for key, value in others.items():
            if self.target.weights == "as_stored" and value is not None:
                raise UserError(
                    f"weights as stored beside {key}",
                    "target.weights = as_stored",
                    f"set {key}=null, or target.weights=converted",
                )
        return self

    @model_validator(mode="after")
    def _sections_agree(self) -> Self:
        if "target" not in self.bench.expected_systems:
            raise UserError(
                "no baseline",
                f"bench.systems = {', '.join(self.bench.expected_systems) or 'empty'}",
                "add target, over which speedups are counted",
            )
        if not self.has_head and self.draft.model != "train":
            raise UserError(
                "a ready head for a chain without heads",
                f"draft.model = {self.draft.model}, train.kind = none",
                "set draft.model=train, or train.kind to another kind",
            )
        if self.has_head and self.quantize is None and self.train.features_from == "intermediate":
            raise UserError(
                "no 4-bit copy of the target to take features from",
                "train.features_from = intermediate, quantize = null",
                "set one of them to its other value",
            )
        if self.train.kind == "steering" and (
            self.small is None or self.small.role != "drafter" or self.small.quantize
        ):
            raise UserError(
                "no model to steer",
                "train.kind = steering without a smaller model that drafts unquantized",
                "add a section small with role: drafter and quantize: false",
            )
        if (
            self.trains_exit_of_target
            and self.small is not None
            and self.small.has_head
            and self.small.quantize
        ):
            raise UserError(
                "early exit of a model that the chain does not have",
                "train.kind = early_exit, small.quantize = true, train.features_from = target",
                "set train.features_from=intermediate or small.train_head=false",
            )
        if (
            self.small is not None
            and self.small_has_head
            and not self.small.quantize
            and self.train.features_from == "intermediate"
        ):
            raise UserError(
                "no 4-bit copy of the smaller model to take features from",
                "train.features_from = intermediate, small.quantize = false",
                "set one of them to its other value",
            )
        return self

    @model_validator(mode="after")
    def _heldout_conversations_suffice(self) -> Self:
        needed = NUM_TASKS * self.plan.num_prompts_per_task
        if asks_heldout(self.bench.prompts, self.data.conversations):
            needed *= 2  # each gets half
        if self.plan.prompts == "heldout" and self.data.num_heldout < needed:
            raise UserError(
                "too few held-out conversations to plan on",
                f"data.num_heldout = {self.data.num_heldout}, {needed} prompts "
                f"({NUM_TASKS} x plan.num_prompts_per_task)",
                "raise the first or lower plan.num_prompts_per_task",
            )
        return self

    @property
    def group_size(self) -> GroupSize:
        """Of 4-bit copies."""
        return "auto" if self.quantize is None else self.quantize.group_size

    @property
    def distills(self) -> bool:
        """Whether 4-bit copies are brought closer to their models."""
        return self.quantize is not None and self.quantize.distill is not None

    @property
    def has_head(self) -> bool:
        """Whether the chain gets a draft head of the target."""
        return self.train.kind != "none"

    @property
    def small_has_head(self) -> bool:
        """Whether a draft head is trained for the smaller model."""
        return self.has_head and self.small is not None and self.small.has_head

    @property
    def trains_exit_of_target(self) -> bool:
        """Whether what is trained drafts for the model itself and not for its 4-bit copy."""
        return self.train.kind == "early_exit" and self.train.features_from == "target"
