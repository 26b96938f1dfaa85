"""What loads a toy head and drafts with it."""

from torch import Tensor

from polybasic.chain.formats.checkpoints.config import ConfigFile
from polybasic.chain.kernels.executor import Executor
from polybasic.chain.kernels.rotary import RotaryTable
from polybasic.chain.kernels.selection import backend_for
from polybasic.chain.kernels.weights import ModelWeights
from polybasic.chain.model.loading import load_layer
from polybasic.chain.model.stored import StoredTensors
from polybasic.deploy.runtime.drafters.head import EagleDrafter


def load_toy_head(file: ConfigFile, target: Executor, num_positions: int) -> Executor:
    """As `polybasic.chain.model.loading.load_head`."""
    config, verifier = file.head, target.weights
    device, dtype = verifier.device, verifier.dtype
    backend = backend_for(device, dtype, verifier.config, config)
    tensors = StoredTensors(file.folder, dtype, device)
    weights = ModelWeights(
        config,
        verifier.embedding,
        (load_layer(config, tensors, backend, "block", kind="toy"),),
        RotaryTable(config, num_positions, dtype, device),
        tensors.linear(backend, "lm_head", lay_out=backend.draft),
        fc=tensors.linear(backend, "join", lay_out=backend.draft),
        feature_layers=config.feature_layers,
    )
    return backend.executor(weights)


class ToyDrafter(EagleDrafter):
    """Drafts as EAGLE's do, and counts what it observes."""

    num_seen = 0

    def observe(self, states: Tensor) -> None:
        """As `EagleDrafter.observe`."""
        ToyDrafter.num_seen += len(states)
        super().observe(states)
