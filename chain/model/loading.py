"""Loads checkpoints as decoders and draft heads, on a device and in a dtype."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType

import torch
from torch import Tensor

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.checkpoints.checkpoint import has_blocks
from polybasic.chain.formats.checkpoints.config import (
    ConfigFile,
    DecoderConfig,
    HeadConfig,
    check_feature_layers,
)
from polybasic.chain.formats.checkpoints.draft_vocabulary import draft_token_ids
from polybasic.chain.formats.checkpoints.kinds import Kind, is_head
from polybasic.chain.formats.checkpoints.names import (
    DRAFT_TABLES,
    layer_linears,
    layer_norms,
    required_biases,
)
from polybasic.chain.formats.checkpoints.shard import ALL, WHOLE, Partition, Shard
from polybasic.chain.formats.head_kinds.eagle3 import feature_norm_names
from polybasic.chain.formats.head_kinds.peagle import MASK_FEATURE
from polybasic.chain.formats.head_kinds.table import HEAD_KINDS
from polybasic.chain.kernels.backend import Backend
from polybasic.chain.kernels.executor import Executor
from polybasic.chain.kernels.product_times import DTYPES, evaluation_dtype
from polybasic.chain.kernels.rotary import RotaryTable
from polybasic.chain.kernels.selection import backend_for
from polybasic.chain.kernels.torch.backends import TorchBackend
from polybasic.chain.kernels.torch.executor import features_of
from polybasic.chain.kernels.weights import (
    Embedding,
    LayerWeights,
    Linear,
    ModelWeights,
    PositionWeights,
)
from polybasic.chain.model.encoder_decoder import load_encoder_decoder
from polybasic.chain.model.stored import StoredTensors


def serving_dtype(file: ConfigFile, device: torch.device) -> torch.dtype:
    """What a model is served in where nobody says otherwise: its own dtype, unless that is slow.

    Kernels are fast in all dtypes that they have. Where there are none, PyTorch's products decide:
    float32, which holds every number of the others, stands for what it multiplies slowly. It also
    stands beside weights of 4 to 8 bits where these are multiplied in it as they are stored.

    Raises:
        UserError: the model's own dtype is none.
    """
    if file.dtype not in DTYPES:
        raise UserError("unknown dtype", f"{file.path} dtype {file.dtype}", "export it again")
    stored = DTYPES[file.dtype]
    wide = backend_for(device, torch.float32)
    if (wide.keeps_blocks and has_blocks(file.folder)) or (wide.packs_4_bits and file.in_4_bits):
        return torch.float32
    backend = backend_for(device, stored, file.decoder)
    return stored if not isinstance(backend, TorchBackend) else evaluation_dtype(stored, device)


def load_decoder(
    file: ConfigFile,
    dtype: torch.dtype,
    device: torch.device,
    num_positions: int,
    shard: Shard = WHOLE,
    all_reduce: Callable[[Tensor], Tensor] | None = None,
    first_layers: int | None = None,
    is_checked: bool = False,
) -> Executor:
    """Load a target (dense) or an intermediate (AWQ) from a checkpoint.

    Args:
        file: of the checkpoint.
        num_positions: positions of the rotary table.
        shard: the part of the model that is read, which `check_divisible` has passed.
        all_reduce: as in `ModelWeights`, comes with a part of a model.
        first_layers: load so many alone; None for all.
        is_checked: whether another model checks its tokens, as `Backend.checked`.

    Raises:
        UserError: an unsupported architecture or quantization, or a missing weight.
    """
    if file.decoder.encoder is not None:
        assert (shard.count, first_layers) == (1, None), "an encoder-decoder is loaded whole"
        return load_encoder_decoder(file, dtype, device)
    config = shard.local(file.decoder, file.group_size)
    if first_layers is not None:
        config = config.of_first_layers(first_layers)
    taken = shard.linears(file.decoder, file.group_size)
    outputs = shard.tokens(config)
    backend = backend_for(device, dtype, config)
    tensors = StoredTensors(file.folder, dtype, device)
    backend.rounds_float32 = in_few_bits = tensors.has_blocks or file.in_4_bits
    rotary = RotaryTable(config, num_positions, dtype, device)
    # the largest tensors first: converting them takes the most memory, when little is in use
    embedding = tensors.embedding(backend, "model.embed_tokens.weight")
    is_tied = config.tie_word_embeddings
    projection = "model.embed_tokens" if is_tied else "lm_head"
    lay_out = backend.checked if is_checked else backend.dense
    if is_tied and isinstance(embedding, Tensor):
        lm_head = lay_out(embedding[outputs], None)
    elif is_tied and not isinstance(embedding, Tensor) and shard.count == 1:
        lm_head = embedding.linear
    else:
        part = [Partition((outputs,))]
        lm_head = tensors.linear(backend, projection, lay_out=lay_out, taken=part)
    layers = []
    for index in range(config.num_layers):
        prefix, kind = f"model.layers.{index}", config.kind_of(index)
        layers.append(load_layer(config, tensors, backend, prefix, kind, taken=taken))

    def draft_lm_head(token_ids: Tensor | None) -> Linear:
        is_whole = token_ids is None and shard.count == 1
        if is_whole and not backend.rounds_drafts(config.hidden_size):
            return lm_head
        chosen = slice(None) if token_ids is None else token_ids.cpu()
        if is_tied and isinstance(embedding, Tensor):
            return backend.draft(embedding[chosen])
        # the weight itself may already be in a layout that cannot be read
        weight, bias = (
            tensors.stored(name)[chosen].to(device, dtype) if name in tensors else None
            for name in (f"{projection}.weight", f"{projection}.bias")
        )
        assert weight is not None, "a projection was loaded"
        return backend.draft(weight, bias)

    scale = config.embedding_scale
    return backend.executor(
        ModelWeights(
            config,
            embedding,
            tuple(layers),
            rotary,
            lm_head,
            config.logit_softcap,
            # transformers rounds the factor to the dtype of the weights
            None if scale is None else torch.tensor(scale, dtype=dtype).item(),
            _load_norm(config, tensors, "model.norm"),
            draft_lm_head=draft_lm_head,
            all_reduce=all_reduce,
            in_few_bits=in_few_bits,
            is_checked=is_checked,
        )
    )


def load_head(file: ConfigFile, target: Executor, num_positions: int) -> Executor:
    """Load a head that drafts for `target`; the embedding is the target's own.

    Args:
        file: of the head.
        target: whose states it reads.
        num_positions: as `load_decoder`.

    Raises:
        UserError: shapes that differ from the target's, a missing weight, or a malformed draft
            vocabulary.
    """
    config, verifier = file.head, target.weights
    check_target(config, verifier, f"{file.path}")
    # they share a matrix
    backend = backend_for(verifier.device, verifier.dtype, verifier.config, config)
    backend.rounds_float32 = verifier.in_few_bits
    tensors = StoredTensors(file.folder, verifier.dtype, verifier.device)
    assert verifier.draft_lm_head is not None, "a verifier"
    return backend.executor(
        head_weights(
            config,
            tensors,
            backend,
            num_positions,
            verifier.embedding,
            verifier.draft_lm_head,
            verifier.logit_softcap,
            stored_draft_token_ids(tensors),
        )
    )


def head_weights(
    config: HeadConfig,
    tensors: StoredTensors,
    backend: Backend,
    num_positions: int,
    embedding: Embedding,
    draft_lm_head: Callable[[Tensor | None], Linear],
    logit_softcap: float | None,
    token_ids: Tensor | None,
) -> ModelWeights:
    """The weights of a draft head.

    Args:
        tensors: named as in checkpoints of its kind.
        num_positions: as `load_decoder`.
        embedding, draft_lm_head, logit_softcap: the verifier's, as in `ModelWeights`.
        token_ids: int64 [V'], those that it drafts; None for all.

    Raises:
        UserError: a missing weight.
    """
    kind = HEAD_KINDS[config.kind]
    prefixes = kind.layers(config)
    layers = [
        load_layer(config, tensors, backend, each, config.kind_of(number), kind.like(number))
        for number, each in enumerate(prefixes)
    ]
    norms = _load_norms(config, tensors, prefixes[0], kind.name)
    has_norm = "norm.weight" in kind.tensors(config)
    if kind.has_lm_head:
        lm_head = tensors.linear(backend, "lm_head", lay_out=backend.draft)
    else:
        lm_head = draft_lm_head(token_ids)
    weights = ModelWeights(
        config,
        tensors.dense("embed_tokens.weight") if kind.reads_own_embedding else embedding,
        tuple(layers),
        RotaryTable(config, num_positions, tensors.dtype, tensors.device),
        lm_head,
        None if kind.has_lm_head else logit_softcap,
        final_norm=_load_norm(config, tensors, "norm") if has_norm else None,
        fc=tensors.linear(backend, "fc", lay_out=backend.draft),
        embedding_norm=norms.get("embedding_norm"),
        feature_norm=norms.get("feature_norm"),
        feature_norms=tuple(map(tensors.dense, feature_norm_names(config.feature_norms))),
        norms_residual=config.norms_residual,
        norms_output=config.norms_output,
        feature_layers=config.feature_layers,
        draft_token_ids=token_ids,
    )
    return replace(weights, positions=_position_weights(config, tensors, weights))


def _position_weights(
    config: HeadConfig, tensors: StoredTensors, weights: ModelWeights
) -> PositionWeights | None:
    if config.num_positions is None:
        return None
    if config.mask_token_id is not None:
        (mask,) = features_of(weights, tensors.dense(MASK_FEATURE).flatten(end_dim=1))
        place_features = mask.expand(config.num_positions - 1, -1)
        return PositionWeights(place_features, mask_token_id=config.mask_token_id)
    place_features = tensors.dense("place_features")
    if not config.markov_rank:
        return PositionWeights(place_features)
    return PositionWeights(place_features, tensors.dense("markov_in"), tensors.dense("markov_out"))


def stored_draft_token_ids(tensors: StoredTensors) -> Tensor | None:
    """Tokens [V'] that a stored head drafts; None for all.

    Raises:
        UserError: a malformed draft vocabulary.
    """
    # by themselves, since tables that are read keep their file mapped
    tables = {name: tensors.stored(name) for name in DRAFT_TABLES if name in tensors}
    token_ids = draft_token_ids(tables, f"{tensors.folder}")
    return None if token_ids is None else token_ids.to(tensors.device)


def check_target(config: HeadConfig, target: ModelWeights, where: str) -> None:
    """Check that a head has its target's sizes; `where` names its config in errors.

    Raises:
        UserError: another width or vocabulary, or layers that the target does not have.
    """
    for key in ("hidden_size", "vocab_size"):
        found, expected = getattr(config, key), getattr(target.config, key)
        if found != expected:
            raise UserError(
                "head does not fit its target",
                f"{where} {key} {found}, target {expected}",
                "train a head for this target",
            )
    check_feature_layers(config, target.config.num_layers, where)


def load_layer(
    config: DecoderConfig,
    tensors: StoredTensors,
    backend: Backend,
    prefix: str,
    kind_of_layer: int = 0,
    kind: Kind = "decoder",
    taken: Mapping[str, Partition] = MappingProxyType({}),
) -> LayerWeights:
    """One layer of a decoder or of a draft head.

    Args:
        prefix: of the names of its tensors.
        kind_of_layer: index into the config's `kinds`.
        kind: of the model; a head's matrices only draft, see `Backend.draft`.
        taken: which part of a linear is read, by its name; all of those that are not named.

    Raises:
        UserError: a missing weight.
    """
    for name in required_biases(config):
        tensors.stored(f"{prefix}.{name}.bias")
    norms = _load_norms(config, tensors, prefix, kind)
    linears = {
        part: tensors.linear(
            backend,
            *(f"{prefix}.{name}" for name in names),
            lay_out=backend.draft if is_head(kind) else None,
            taken=[taken.get(name, ALL) for name in names],
        )
        for part, names in layer_linears(config, kind).items()
    }
    return LayerWeights(
        kind_of_layer,
        linears["qkv"],
        linears["out"],
        linears["gate_up"],
        linears["down"],
        norms["mlp_norm"],
        norms.get("input_norm"),
        norms.get("query_norm"),
        norms.get("key_norm"),
        norms.get("attention_post_norm"),
        norms.get("mlp_post_norm"),
    )


def _load_norms(
    config: DecoderConfig, tensors: StoredTensors, prefix: str, kind: Kind = "decoder"
) -> dict[str, Tensor]:
    """A layer's norms by part."""
    return {
        part: _load_norm(config, tensors, f"{prefix}.{name}")
        for part, (name, _) in layer_norms(config, kind).items()
    }


def _load_norm(config: DecoderConfig, tensors: StoredTensors, name: str) -> Tensor:
    weight = tensors.dense(f"{name}.weight")
    return weight.float() + 1 if config.has_offset_norms else weight
