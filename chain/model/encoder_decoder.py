"""Loads encoder-decoders."""

from collections.abc import Mapping

import torch
from torch import Tensor

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.checkpoints.config import ConfigFile
from polybasic.chain.formats.checkpoints.decoder_config import Shape
from polybasic.chain.formats.checkpoints.names import (
    LM_HEAD,
    T5_BIAS,
    T5_ENCODER,
    encoder_linears,
    encoder_norms,
    has_lm_head,
    layer_linears,
    layer_norms,
    model_names,
)
from polybasic.chain.kernels.rotary import RotaryTable
from polybasic.chain.kernels.torch.backends import TorchBackend
from polybasic.chain.kernels.torch.encoder_decoder import (
    EncoderDecoderExecutor,
    EncoderWeights,
    SourceWeights,
)
from polybasic.chain.kernels.weights import LayerWeights, Linear, ModelWeights
from polybasic.chain.model.stored import StoredTensors


def load_encoder_decoder(
    file: ConfigFile, dtype: torch.dtype, device: torch.device
) -> EncoderDecoderExecutor:
    """Load an encoder-decoder as a target, an intermediate or a drafter.

    Raises:
        UserError: a missing weight, or float16, in which the numbers of T5's layers overflow.
    """
    if dtype == torch.float16:
        where = f"{file.folder} in float16"
        raise UserError("T5's numbers overflow", where, "use dtype bfloat16 or float32")
    config, tensors = file.decoder, StoredTensors(file.folder, dtype, device)
    assert config.encoder is not None, "an encoder-decoder"
    backend, names = TorchBackend(device, dtype), model_names(config)

    def linears(prefix: str, groups: Mapping[str, Mapping[str, Shape]]) -> dict[str, Linear]:
        return {
            part: tensors.linear(backend, *(f"{prefix}.{name}" for name in named))
            for part, named in groups.items()
        }

    def norms(prefix: str, parts: Mapping[str, tuple[str, Shape]]) -> dict[str, Tensor]:
        return {part: tensors.dense(f"{prefix}.{name}.weight") for part, (name, _) in parts.items()}

    layers, sources, encoder_layers = [], [], []
    for index in range(config.num_layers):
        prefix = names.layer.format(index)
        products = linears(prefix, layer_linears(config))
        weights = norms(prefix, layer_norms(config))
        layers.append(_layer(products, weights))
        of_source = (products[f"source_{part}"] for part in ("query", "key_value", "out"))
        sources.append(SourceWeights(weights["source_norm"], *of_source))
    for index in range(config.encoder.num_layers):
        prefix = T5_ENCODER.layer.format(index)
        encoder_layers.append(
            _layer(linears(prefix, encoder_linears(config)), norms(prefix, encoder_norms(config)))
        )
    distances, decoder_distances = (
        tensors.dense(T5_BIAS.format(each.layer.format(0))) for each in (T5_ENCODER, names)
    )
    embedding = tensors.dense(names.embedding)
    projection = LM_HEAD if has_lm_head(config, tensors) else names.embedding
    decoder = ModelWeights(
        config,
        embedding,
        tuple(layers),
        RotaryTable(config, 1, dtype, device),  # there are no rotations
        tensors.linear(backend, projection.removesuffix(".weight")),
        final_norm=tensors.dense(names.norm),
    )
    encoder = EncoderWeights(
        tuple(encoder_layers),
        tensors.dense(T5_ENCODER.norm),
        distances,
        decoder_distances,
        tuple(sources),
    )
    return EncoderDecoderExecutor(decoder, encoder)


def _layer(linears: Mapping[str, Linear], norms: Mapping[str, Tensor]) -> LayerWeights:
    return LayerWeights(
        0,
        linears["qkv"],
        linears["out"],
        linears["gate_up"],
        linears["down"],
        norms["mlp_norm"],
        norms["input_norm"],
    )
