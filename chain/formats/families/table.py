"""The families of decoders that there are, one a line."""

from polybasic.chain.formats.extensions import Registry
from polybasic.chain.formats.families.gemma import GEMMA2, GEMMA3
from polybasic.chain.formats.families.llama import LLAMA
from polybasic.chain.formats.families.mistral import MISTRAL
from polybasic.chain.formats.families.phi import PHI3
from polybasic.chain.formats.families.qwen import QWEN2, QWEN3
from polybasic.chain.formats.families.t5 import T5

FAMILIES = Registry(
    "polybasic.families",
    "model_type",
    LLAMA,
    MISTRAL,
    QWEN2,
    QWEN3,
    PHI3,
    GEMMA2,
    GEMMA3,
    T5,
)
"""By model_type."""
