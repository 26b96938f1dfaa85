"""The tunable fields of the 4-bit intermediate."""

from typing import Literal

from pydantic import Field

from polybasic.chain.settings import Settings


class QuantizeSettings(Settings):
    """AWQ in AutoAWQ's GEMM format."""

    bits: Literal[4] = 4
    group_size: Literal[128] = 128
    num_calibration_samples: int = Field(64, ge=1)
    calibration_tokens: int = Field(256, ge=16, description="tokens of one calibration sample")
    num_quality_tokens: int = Field(
        4096, ge=64, description="held-out tokens of the quality record"
    )
