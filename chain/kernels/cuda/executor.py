"""The operations of a device by Triton kernels, where they support the sizes."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from polybasic.chain.kernels.cuda import attention
from polybasic.chain.kernels.cuda.draft_operations import DraftOperations
from polybasic.chain.kernels.cuda.joined_passes import JoinedPasses
from polybasic.chain.kernels.cuda.products import fused
from polybasic.chain.kernels.cuda.products.launch import (
    MAX_ROWS,
    ROWS_OF_KERNELS,
    ManyRows,
    dequantized_blocks,
)
from polybasic.chain.kernels.drafts import Candidates
from polybasic.chain.kernels.executor import DraftRequest, Layers, Runner
from polybasic.chain.kernels.rotary import Rotation
from polybasic.chain.kernels.rows import Rows
from polybasic.chain.kernels.torch.executor import TorchExecutor
from polybasic.chain.kernels.torch.operations import (
    DeviceEmbedding,
    DeviceLinear,
    Heads,
    JoinedLinear,
    Norm,
    Operations,
)
from polybasic.chain.kernels.torch.rows import DeviceRows, Span
from polybasic.chain.kernels.weights import Linear, ModelWeights


class TritonOperations(DraftOperations):
    """Adds norms, products and attention of few rows in Triton."""

    def norm(self, x_RI: Tensor, norm: Norm) -> Tensor:
        return fused.norm(x_RI, norm)

    def product(
        self,
        linear: Linear,
        x_RI: Tensor,
        norm: Norm | None = None,
        added: Tensor | None = None,
    ) -> Tensor:
        if isinstance(linear, JoinedLinear):
            return self.joined_product(linear, x_RI, norm, added)
        return fused.product(_of_device(linear), x_RI, norm, added)

    def gated_product(
        self, linear: Linear, x_RI: Tensor, norm: Norm | None, activation: str
    ) -> Tensor:
        if isinstance(linear, JoinedLinear):
            return super().gated_product(linear, x_RI, norm, activation)
        return fused.gated_product(_of_device(linear), x_RI, norm, activation)

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


class TritonEmbedding(DeviceEmbedding):
    """Takes rows in one launch."""

    def rows(self, token_ids: Tensor) -> Tensor:
        return dequantized_blocks(self.weight, self.dtype, token_ids)


class CudaExecutor(TorchExecutor):
    """Runs passes on an NVIDIA GPU by Triton's kernels, those over many rows by PyTorch's."""

    name: ClassVar[str] = "cuda"
    operations: Operations = TritonOperations()
    embedding: ClassVar[type[DeviceEmbedding]] = TritonEmbedding
    _many_rows: Operations = ManyRows()

    def __init__(self, weights: ModelWeights, runs_on_device: bool = False) -> None:
        super().__init__(weights, runs_on_device)
        self._joined: JoinedPasses | None = None

    def forward(
        self,
        token_ids: Tensor,
        caches: Sequence[Layers],
        rows: Sequence[Rows | DeviceRows],
        features: Tensor | None = None,
        feature_layers: tuple[int, ...] = (),
    ) -> Tensor:
        known = [read for read in rows if isinstance(read, Rows)]
        if self._joined is not None and known:
            states = self._joined.forward(token_ids, caches, known, features, feature_layers)
            if states is not None:
                return states
        return super().forward(token_ids, caches, rows, features, feature_layers)

    def drafts(self, requests: Sequence[DraftRequest]) -> list[Candidates]:
        joined, are_known = (
            self._joined,
            all(isinstance(request.start, int) for request in requests),
        )
        most = max(request.top_k for request in requests)
        if joined is None or not are_known or most > MAX_ROWS or self.weights.positions is not None:
            return super().drafts(requests)
        return joined.drafts(requests)

    def operations_for(self, num_rows: int) -> Operations:
        return self.operations if num_rows <= MAX_ROWS else self._many_rows

    def prepare(self, functions: Sequence[Callable[[], None]]) -> None:
        with fused.noted() as found, torch.inference_mode():
            for function in functions:
                function()
        fused.prepare(list(found.values()))

    def capture_by(self, runner: Runner) -> None:
        # what is divided over processes waits for the others
        if self.weights.all_reduce is None:
            self._joined = JoinedPasses(self, runner)

    def known_passes(self) -> list[Callable[[], None]]:
        return [partial(self._products_over, num) for num in ROWS_OF_KERNELS]

    def _products_over(self, num_rows: int) -> None:
        """All products of a pass over so many rows."""
        config, weights = self.config, self.weights
        ids = torch.zeros(num_rows, dtype=torch.int64, device=self.device)
        width, features = config.num_heads * config.head_dim, None
        if weights.is_head:
            inputs = torch.zeros(
                num_rows, weights.input_width, dtype=self.dtype, device=self.device
            )
            features = self.features(inputs)
        states = self.run_layers(
            self.operations, ids, lambda _, qkv: qkv.new_zeros(num_rows, width), features, ()
        )
        self.logits(states)


def _of_device(linear: Linear) -> DeviceLinear:
    assert isinstance(linear, DeviceLinear), "weights in the layout of another executor"
    return linear
