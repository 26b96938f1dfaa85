"""An EAGLE-2 draft head as the runtime runs it.

#   R = rows (tokens of one pass), D = hidden size of the target
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from polybasic.chain.attend import Attend
from polybasic.chain.config import DecoderConfig
from polybasic.chain.decoder import DecoderLayer
from polybasic.chain.linear import Linear
from polybasic.chain.rotary import RotaryTable


class EagleHead:
    """One decoder layer that continues the target's features (Li et al., EAGLE-2, 2024).

    Row t reads the feature of token t (the target's state after its final norm) together with
    token t+1, and answers with a guess of the feature of token t+1; the target's own output
    projection turns that into a distribution over token t+2. The row's position is t.

    Args:
        config: of the head's single layer.
        embedding: the target's, [V, D], as it is stored: no family's factor is applied.
        fc: 2D -> D.
    """

    def __init__(
        self,
        config: DecoderConfig,
        embedding: Tensor,
        fc: Linear,
        layer: DecoderLayer,
        rotary: RotaryTable,
    ) -> None:
        self.config, self.rotary = config, rotary
        self.embedding, self.fc, self.layer = embedding, fc, layer

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    def forward(self, token_ids: Tensor, features: Tensor, cache: Tensor, attend: Attend) -> Tensor:
        """Guessed features [R, D].

        Args:
            token_ids: int64 [R], token t+1 of each row.
            features: [R, D], feature of token t of each row.
            cache: [2K, capacity, H]; rows from `attend.start` on are written.
        """
        x_RD = self.fc(torch.cat([F.embedding(token_ids, self.embedding), features], -1))
        return self.layer.forward(x_RD, cache, attend)
