"""Passes of encoder-decoders, held against transformers' T5."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import T5Config, T5ForConditionalGeneration
from transformers.models.t5.modeling_t5 import T5Attention

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.checkpoints.config import decoder_config, read_config
from polybasic.chain.formats.checkpoints.decoder_config import EncoderConfig
from polybasic.chain.formats.checkpoints.shapes import check_shapes
from polybasic.chain.kernels.rows import Rows, consecutive_rows, tree_rows
from polybasic.chain.kernels.torch.encoder_decoder import (
    EncoderDecoderExecutor,
    buckets,
    source_length,
)
from polybasic.chain.model.loading import load_decoder
from polybasic.deploy.runtime.rounds.cache import KeyValueCache
from tests.checkpoints import T5_VOCAB_SIZE, write_t5

CPU = torch.device("cpu")
START = 0
SOURCE, ANSWER = 150, 160
"""Both longer than the distance from which on all are one."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("t5")
    # an encoder that is not as deep as the decoder
    write_t5(folder, num_layers=2)
    return folder


@pytest.fixture(scope="module")
def reference(folder: Path) -> T5ForConditionalGeneration:
    return T5ForConditionalGeneration.from_pretrained(folder).eval()


@pytest.fixture(scope="module")
def model(folder: Path) -> EncoderDecoderExecutor:
    file = read_config(folder)
    check_shapes("decoder", folder, file.decoder)
    model = load_decoder(file, torch.float32, CPU, 1)
    assert isinstance(model, EncoderDecoderExecutor)
    return model


def tokens(num: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, T5_VOCAB_SIZE, (num,), generator=generator)


def decoded(num: int, seed: int = 1) -> Tensor:
    return torch.cat([torch.tensor([START]), tokens(num - 1, seed)])


def cache_of(model: EncoderDecoderExecutor) -> KeyValueCache:
    return KeyValueCache.of(model, SOURCE + ANSWER + 20)


@torch.inference_mode()
def read(
    model: EncoderDecoderExecutor, cache: KeyValueCache, ids: Tensor, rows: Rows | None = None
) -> Tensor:
    """Logits of tokens after those that the cache holds, which are kept unless they are a tree."""
    given = consecutive_rows(cache.length, len(ids)) if rows is None else rows
    states = model.forward(ids, [cache.layers], [given])
    if rows is None:
        cache.keep(range(len(ids)))
    return model.logits(states)


@torch.inference_mode()
def expected(reference: T5ForConditionalGeneration, source: Tensor, answer: Tensor) -> Tensor:
    return reference(input_ids=source[None], decoder_input_ids=answer[None]).logits[0]


def assert_same(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-3)


def test_logits_are_transformers_however_a_sequence_is_read(
    model: EncoderDecoderExecutor, reference: T5ForConditionalGeneration
) -> None:
    source, answer = tokens(SOURCE, 0), decoded(ANSWER)
    wanted = expected(reference, source, answer)
    whole = read(model, cache_of(model), torch.cat([source, answer]))[SOURCE:]
    assert_same(whole, wanted)
    # the source alone, then the start token, then parts
    cache = cache_of(model)
    read(model, cache, source)
    parts = [read(model, cache, part) for part in answer.split([1, 90, 1, ANSWER - 92])]
    assert_same(torch.cat(parts), wanted)


def test_rows_of_a_tree_see_their_ancestors_and_the_source(
    model: EncoderDecoderExecutor, reference: T5ForConditionalGeneration
) -> None:
    source, answer = tokens(SOURCE, 0), decoded(20)
    cache = cache_of(model)
    read(model, cache, torch.cat([source, answer[:10]]))
    branch = tokens(2, 9)
    tree = [*range(-1, 9), 3, 10]  # a path of ten rows, and two that follow the fourth
    found = read(model, cache, torch.cat([answer[10:], branch]), tree_rows(SOURCE + 10, tree))
    assert_same(found[:10], expected(reference, source, answer)[10:])
    other = torch.cat([answer[:14], branch])
    assert_same(found[10:], expected(reference, source, other)[14:])


@torch.inference_mode()
def test_sequences_of_one_pass_keep_their_sources(model: EncoderDecoderExecutor) -> None:
    sources = [tokens(num, seed) for seed, num in enumerate((7, 31, 12))]
    texts = [torch.cat([source, decoded(5, seed)]) for seed, source in enumerate(sources)]
    alone = [read(model, cache_of(model), text) for text in texts]
    caches = [cache_of(model) for _ in texts]
    # the second has read its source; the others begin
    read(model, caches[1], sources[1])
    parts = [texts[0], texts[1][31:], texts[2]]
    rows = [
        consecutive_rows(cache.length, len(part)) for cache, part in zip(caches, parts, strict=True)
    ]
    states = model.forward(torch.cat(parts), [cache.layers for cache in caches], rows)
    found = model.logits(states).split([len(part) for part in parts])
    assert_same(found[0][7:], alone[0][7:])
    assert_same(found[1], alone[1][31:])
    assert_same(found[2][12:], alone[2][12:])
    # and another source is another answer
    assert not torch.allclose(found[0][-1], found[2][-1], atol=1e-2)


def test_a_sequence_begins_anew_with_another_source(model: EncoderDecoderExecutor) -> None:
    first, second, answer = tokens(40, 3), tokens(9, 4), decoded(6)
    cache = cache_of(model)
    read(model, cache, torch.cat([first, answer]))
    cache.truncate(0)
    found = read(model, cache, torch.cat([second, answer]))[9:]
    assert_same(found, read(model, cache_of(model), torch.cat([second, answer]))[9:])


def test_distances_decide(folder: Path) -> None:
    """Negative control: without what is added by distance logits are others."""
    model = load_decoder(read_config(folder), torch.float32, CPU, 1)
    assert isinstance(model, EncoderDecoderExecutor)
    text = torch.cat([tokens(20, 0), decoded(6)])
    before = read(model, cache_of(model), text)[20:]
    for name in ("distances", "decoder_distances"):
        kept = getattr(model.encoder, name).clone()
        getattr(model.encoder, name).zero_()
        assert not torch.allclose(read(model, cache_of(model), text)[20:], before, atol=1e-2)
        getattr(model.encoder, name).copy_(kept)


@pytest.mark.parametrize("both_ways", [True, False])
@pytest.mark.parametrize(("num_buckets", "most"), [(32, 128), (8, 20)])
def test_buckets_are_transformers(both_ways: bool, num_buckets: int, most: int) -> None:
    shape = EncoderConfig(1, num_buckets, most, START)
    distances = torch.arange(-300, 301 if both_ways else 1)
    wanted = T5Attention._relative_position_bucket(distances, both_ways, num_buckets, most)
    assert torch.equal(buckets(distances, shape, both_ways), wanted)


def test_a_source_ends_at_the_first_start_token() -> None:
    assert source_length([5, 6, START, 7, START], START) == 2
    assert source_length([5, 6], START) == 2
    assert source_length([START], START) == 0


def test_a_projection_that_is_the_embedding(tmp_path: Path) -> None:
    write_t5(tmp_path)
    from safetensors.torch import load_file, save_file

    path = tmp_path / "model.safetensors"
    stored = load_file(path)
    stored["shared.weight"] /= 8
    del stored["lm_head.weight"]
    save_file(stored, path, metadata={"format": "pt"})
    file = read_config(tmp_path)
    check_shapes("decoder", tmp_path, file.decoder)
    model = load_decoder(file, torch.float32, CPU, 1)
    assert isinstance(model, EncoderDecoderExecutor)
    reference = T5ForConditionalGeneration.from_pretrained(tmp_path).eval()
    source, answer = tokens(12, 0), decoded(8)
    found = read(model, cache_of(model), torch.cat([source, answer]))[12:]
    assert_same(found, expected(reference, source, answer))


def test_float16_is_refused(folder: Path) -> None:
    with pytest.raises(UserError, match=r"numbers overflow: .* in float16; use dtype bfloat16"):
        load_decoder(read_config(folder), torch.float16, CPU, 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"feed_forward_proj": "relu"}, "unsupported T5: c feed_forward_proj 'relu'"),
        ({"tie_word_embeddings": True, "scale_decoder_outputs": True}, "tie_word_embeddings that"),
        ({"d_kv": None}, "malformed model config: c d_kv None"),
        ({"num_heads": "no"}, "malformed model config: c num_heads 'no'"),
        ({"relative_attention_num_buckets": "32"}, "relative_attention_num_buckets '32'"),
        ({"relative_attention_max_distance": 16}, "max_distance 16"),
        ({"decoder_start_token_id": -1}, "decoder_start_token_id -1"),
        ({"num_decoder_layers": 0}, "num_hidden_layers 0"),
    ],
)
def test_configs_that_are_refused(folder: Path, changes: dict[str, object], message: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    with pytest.raises(UserError, match=message):
        decoder_config(config | changes, "c")


def test_a_config_is_completed_as_transformers_completes_it() -> None:
    given = {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 3}
    given |= {"vocab_size": 48, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
    read, found = T5Config(**given), decoder_config({"model_type": "t5", **given}, "c")
    assert found.encoder == EncoderConfig(
        read.num_layers,
        read.relative_attention_num_buckets,
        read.relative_attention_max_distance,
        read.pad_token_id,
    )
    assert (found.hidden_size, found.head_dim, found.num_heads) == (64, 16, 3)
    assert (found.num_layers, found.intermediate_size) == (read.num_decoder_layers, 96)
    assert found.rms_norm_eps == read.layer_norm_epsilon
    written = {"model_type": "t5", **read.to_dict()}
    assert decoder_config(written, "c") == found


def test_a_config_without_a_size_is_refused(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    del config["d_model"]
    with pytest.raises(UserError, match="model config lacks a key: c d_model"):
        decoder_config(config, "c")


def test_a_missing_tensor_of_the_encoder_is_named(tmp_path: Path) -> None:
    write_t5(tmp_path)
    from safetensors.torch import load_file, save_file

    path, name = tmp_path / "model.safetensors", "encoder.block.1.layer.0.SelfAttention.v.weight"
    stored = load_file(path)
    del stored[name]
    save_file(stored, path, metadata={"format": "pt"})
    with pytest.raises(UserError, match=f"missing tensor: {name}"):
        check_shapes("decoder", tmp_path, read_config(tmp_path).decoder)
