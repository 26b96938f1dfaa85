"""Loads DFlash heads."""

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.checkpoints.config import ConfigFile
from polybasic.chain.formats.checkpoints.decoder_config import HeadConfig
from polybasic.chain.formats.head_kinds.dflash import DFLASH, Domino, Markov, block_of
from polybasic.chain.kernels.backend import Backend
from polybasic.chain.kernels.executor import Executor
from polybasic.chain.kernels.rotary import RotaryTable
from polybasic.chain.kernels.selection import backend_for
from polybasic.chain.kernels.torch.backends import TorchBackend
from polybasic.chain.kernels.torch.corrections import Corrector, DominoWeights, MarkovWeights
from polybasic.chain.kernels.torch.dflash import DFlashExecutor, DFlashWeights
from polybasic.chain.kernels.weights import Embedding, Linear
from polybasic.chain.model.loading import check_target, load_layer, stored_draft_token_ids
from polybasic.chain.model.stored import StoredTensors

_INPUTS = 16
"""Kernels take weights over a multiple of so many inputs."""


def load_dflash(file: ConfigFile, target: Executor, num_positions: int) -> DFlashExecutor:
    """As `polybasic.chain.model.loading.load_head`.

    Raises:
        UserError: shapes that differ from the target's, a target that scales its embeddings, a
            missing weight, or a malformed draft vocabulary.
    """
    config, verifier = file.head, target.weights
    check_target(config, verifier, f"{file.path}")
    if verifier.embedding_scale is not None:
        raise UserError(
            "unsupported head",
            f"{file.path}: a DFlash head of a model that scales its embeddings",
            "supported: heads of the other families",
        )
    assert verifier.draft_lm_head is not None, "a verifier"
    backend = backend_for(verifier.device, verifier.dtype, verifier.config, config)
    backend.rounds_float32 = verifier.in_few_bits
    tensors = StoredTensors(file.folder, verifier.dtype, verifier.device)
    token_ids = stored_draft_token_ids(tensors)
    return DFlashExecutor(
        DFlashWeights(
            config,
            verifier.embedding,
            tuple(
                load_layer(config, tensors, backend, layer, config.kind_of(number), DFLASH.name)
                for number, layer in enumerate(DFLASH.layers(config))
            ),
            RotaryTable(config, num_positions, tensors.dtype, tensors.device),
            verifier.draft_lm_head(token_ids),
            final_norm=tensors.dense("norm.weight"),
            fc=tensors.linear(backend, "fc", lay_out=backend.draft),
            feature_norm=tensors.dense("hidden_norm.weight"),
            feature_layers=config.feature_layers,
            draft_token_ids=token_ids,
            block=block_of(config),
            corrector=_corrector(config, tensors, backend, verifier.embedding),
        )
    )


def _corrector(
    config: HeadConfig, tensors: StoredTensors, backend: Backend, embedding: Embedding
) -> Corrector | None:
    def linear(name: str, has_bias: bool = False) -> Linear:
        weight = tensors.dense(name)
        laid_out_by = backend
        if weight.shape[1] % _INPUTS:
            laid_out_by = TorchBackend(tensors.device, tensors.dtype)
        bias = tensors.dense(f"{name.removesuffix('weight')}bias") if has_bias else None
        return laid_out_by.draft(weight, bias)

    match block_of(config).correction:
        case Domino(_, state_size, num_plain):
            return DominoWeights(
                embedding,
                linear("prefix_gru.weight_ih_l0"),
                linear("prefix_gru.weight_hh_l0"),
                state_size,
                linear("embed_proj.0.weight"),
                linear("embed_proj.2.weight"),
                num_plain,
            )
        case Markov(_, kind, _):
            name = "markov_head."
            return MarkovWeights(
                tensors.dense(f"{name}markov_w1.weight"),
                linear(f"{name}markov_w2.weight"),
                linear(f"{name}gate_proj.weight", has_bias=True) if kind == "gated" else None,
                linear(f"{name}joint_proj.weight", has_bias=True) if kind == "rnn" else None,
            )
    return None
