"""Loads the steering of an independent model."""

from polybasic.chain.formats.checkpoints.config import ConfigFile
from polybasic.chain.formats.head_kinds.steering import DOWN, UP, check_steered
from polybasic.chain.kernels.executor import Executor
from polybasic.chain.kernels.selection import backend_for
from polybasic.chain.kernels.torch.steering import SteeredExecutor
from polybasic.chain.model.loading import check_target
from polybasic.chain.model.stored import StoredTensors


def load_steering(file: ConfigFile, target: Executor, drafter: Executor) -> Executor:
    """Load a model that is steered; its weights are those of `drafter`.

    Args:
        file: of the steering.
        target: whose states it reads.
        drafter: the model as it drafts alone.

    Raises:
        UserError: shapes that differ from the target's or the drafter's, or a missing weight.
    """
    check_target(file.head, target.weights, f"{file.path}")
    check_steered(file.head, drafter.config, f"{file.path}")
    tensors = StoredTensors(file.folder, drafter.dtype, drafter.device)
    return steered(tensors, drafter, file.head.hidden_size)


def steered(tensors: StoredTensors, drafter: Executor, verifier_width: int) -> Executor:
    """A model with the map that a steering's checkpoint holds.

    Args:
        tensors: of the checkpoint.
        drafter: the model as it drafts alone.
        verifier_width: of the states that it reads.

    Raises:
        UserError: a missing weight.
    """
    weights = drafter.weights
    backend = backend_for(weights.device, weights.dtype, weights.config)
    down, up = (tensors.linear(backend, name) for name in (DOWN, UP))
    return SteeredExecutor(weights, down, up, verifier_width)
