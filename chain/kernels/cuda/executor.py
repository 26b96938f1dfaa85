"""The operations of a device by Triton kernels, where they support the sizes."""

from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from polybasic.chain.kernels.cuda import attention, products
from polybasic.chain.kernels.cuda.draft_operations import DraftOperations
from polybasic.chain.kernels.cuda.product_launch import ManyRows
from polybasic.chain.kernels.rotary import Rotation
from polybasic.chain.kernels.torch.executor import TorchExecutor
from polybasic.chain.kernels.torch.operations import DeviceLinear, Heads, Norm, Operations
from polybasic.chain.kernels.torch.rows import DeviceRows, Span
from polybasic.chain.kernels.weights import Linear


class TritonOperations(DraftOperations):
    """Adds norms, products and attention of few rows in Triton."""

    def norm(self, x_RI: Tensor, norm: Norm) -> Tensor:
        return products.norm(x_RI, norm)

    def product(
        self,
        linear: Linear,
        x_RI: Tensor,
        norm: Norm | None = None,
        added: Tensor | None = None,
    ) -> Tensor:
        return products.product(_of_device(linear), x_RI, norm, added)

    def gated_product(
        self, linear: Linear, x_RI: Tensor, norm: Norm | None, activation: str
    ) -> Tensor:
        return products.gated_product(_of_device(linear), x_RI, norm, activation)

    def attention(
        self,
        qkv: Tensor,
        cache: Tensor,
        rows: DeviceRows,
        span: Span,
        heads: Heads,
        rotation: Rotation,
    ) -> Tensor:
        return attention.attention(qkv, cache, rows, span, heads, rotation)


class CudaExecutor(TorchExecutor):
    """Runs rounds on an NVIDIA GPU by Triton's kernels; what the host knows, PyTorch computes."""

    name: ClassVar[str] = "cuda"
    operations: Operations = TritonOperations()
    known_operations: Operations = ManyRows()

    def prepare(self, functions: Sequence[Callable[[], None]]) -> None:
        with products.noted() as found, torch.inference_mode():
            for function in functions:
                function()
        products.prepare(list(found.values()))


def _of_device(linear: Linear) -> DeviceLinear:
    assert isinstance(linear, DeviceLinear), "weights in the layout of another executor"
    return linear
