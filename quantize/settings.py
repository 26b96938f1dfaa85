"""The tunable fields of the 4-bit intermediate."""

from typing import Literal

from pydantic import Field, model_validator

from polybasic.chain.base.settings import Count, Factor, Settings, Size, Weight

GroupSize = Literal["auto", 128, 64, 32]


class DistillSettings(Settings):
    """A short distillation of the intermediate towards its target, with the rounding in the loop.

    A LoRA (peft) moves weights on their 4-bit grid; what it moved is merged and packed.
    """

    num_steps: Count = Field(200, description="optimizer steps")
    batch_tokens: Count = Field(2048, ge=2, description="tokens of one optimizer step")
    row_tokens: Count = Field(256, ge=2, description="conversations are packed into rows so long")
    learning_rate: Weight = Field(5e-3, description="AdamW, falling linearly to 0")
    max_gradient_norm: Factor = 1.0
    lora_rank: Size = 16
    lora_alpha: Factor = Field(16.0, description="weights move by alpha / rank x (B A) steps")
    recompute_layers: bool = Field(
        False, description="run layers again in the backward pass: less memory, a third more time"
    )

    @model_validator(mode="after")
    def _check_rows(self) -> "DistillSettings":
        if self.row_tokens > self.batch_tokens:
            raise ValueError(
                f"row_tokens {self.row_tokens} exceeds batch_tokens {self.batch_tokens}"
            )
        return self


class QuantizeSettings(Settings):
    """AWQ in AutoAWQ's GEMM format."""

    group_size: GroupSize = Field(
        "auto",
        description="inputs that share a scale: auto takes the largest of 128, 64 and 32 that "
        "divides the inputs of all layers",
    )
    num_calibration_samples: Count = 64
    calibration_tokens: Count = Field(256, ge=16, description="tokens of one calibration sample")
    num_quality_tokens: Count = Field(
        4096, ge=64, description="held-out tokens of the quality record"
    )
    distill: DistillSettings | None = Field(
        None, description="bring the copy closer to its target before it is used; kept if it pays"
    )
