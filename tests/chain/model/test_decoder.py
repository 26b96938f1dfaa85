"""The decoder against transformers, in float32: prompt, token by token with the cache, trees."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from polybasic.chain.errors import UserError
from polybasic.chain.formats.config import LayerKind, decoder_config, read_config
from polybasic.chain.model.decoder import Decoder
from polybasic.chain.model.loading import load_decoder
from polybasic.deploy.rounds.cache import KeyValueCache
from polybasic.deploy.rounds.tree import DraftTree
from polybasic.deploy.rounds.verifier import Verifier

TOLERANCE = 1e-5
SHAPES = {
    "grouped queries": {"num_attention_heads": 4, "num_key_value_heads": 2},
    "one kv head a head": {"num_attention_heads": 2, "num_key_value_heads": 2},
    "tied embeddings": {"num_attention_heads": 2, "tie_word_embeddings": True},
    "own head size": {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16},
    "llama 3 scaling": {
        "num_attention_heads": 4,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
}


@pytest.fixture(params=SHAPES.values(), ids=SHAPES.keys())
def models(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[LlamaForCausalLM, Decoder]:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        max_position_embeddings=256,
        initializer_range=0.2,
        **request.param,
    )
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    model.save_pretrained(tmp_path)
    return model, load_decoder(read_config(tmp_path), torch.float32, torch.device("cpu"), 256)


def make_verifier(decoder: Decoder) -> Verifier:
    cache = KeyValueCache(decoder.config, 3, 64, torch.float32, torch.device("cpu"))
    return Verifier("target", decoder, cache)


@torch.inference_mode()
def test_prompt_then_tokens_then_block(models: tuple[LlamaForCausalLM, Decoder]) -> None:
    model, decoder = models
    ids = torch.randint(0, 97, (30,)).tolist()
    expected = model(torch.tensor([ids])).logits[0]
    verifier = make_verifier(decoder)
    logits = []
    for first, end in ((0, 12), (12, 13), (13, 14), (14, 22), (22, 30)):
        logits.append(verifier.logits(verifier.read(ids[first:end])))
        verifier.cache.keep(range(end - first))
    assert (torch.cat(logits) - expected).abs().max() < TOLERANCE * expected.abs().max()


@torch.inference_mode()
def test_tree_rows_and_cache_moves(models: tuple[LlamaForCausalLM, Decoder]) -> None:
    """Each row of a tree, and what follows a kept path, equal a recomputation without a cache."""
    model, decoder = models
    prompt = torch.randint(0, 97, (9,)).tolist()
    tree = DraftTree([5, 11, 12, 13, 14, 15, 16], [-1, 0, 0, 1, 2, 2, 5])
    verifier = make_verifier(decoder)
    verifier.read(prompt)
    verifier.cache.keep(range(len(prompt)))
    logits = verifier.logits(verifier.read_tree(tree))
    for row in range(len(tree)):
        path = [row]
        while tree.parents[path[0]] >= 0:
            path.insert(0, tree.parents[path[0]])
        text = prompt + [tree.tokens[node] for node in path]
        expected = model(torch.tensor([text])).logits[0, -1]
        assert (logits[row] - expected).abs().max() < TOLERANCE * expected.abs().max()
    kept = [0, 2, 5, 6]
    verifier.cache.keep(kept)
    following = verifier.logits(verifier.read([3, 4]))
    text = prompt + [tree.tokens[node] for node in kept] + [3, 4]
    expected = model(torch.tensor([text])).logits[0, -2:]
    assert (following - expected).abs().max() < TOLERANCE * expected.abs().max()


@torch.inference_mode()
def test_a_wrong_cache_move_shows(models: tuple[LlamaForCausalLM, Decoder]) -> None:
    model, decoder = models
    prompt = torch.randint(0, 97, (9,)).tolist()
    tree = DraftTree([5, 11, 12, 13], [-1, 0, 0, 2])
    verifier = make_verifier(decoder)
    verifier.read(prompt)
    verifier.cache.keep(range(len(prompt)))
    verifier.read_tree(tree)
    verifier.cache.keep([0, 1, 3])  # row 3 is a child of row 2
    following = verifier.logits(verifier.read([3]))
    expected = model(torch.tensor([[*prompt, 5, 12, 13, 3]])).logits[0, -1:]
    assert (following - expected).abs().max() > 100 * TOLERANCE * expected.abs().max()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model_type": "mamba"}, "unsupported architecture: here model_type 'mamba'; supported:"),
        ({"model_type": None}, "unsupported architecture: here model_type None; supported: llama,"),
        ({"model_type": "gemma3"}, "unsupported architecture: here model_type 'gemma3'; supported"),
        ({"hidden_act": "gelu"}, "unsupported architecture: here hidden_act 'gelu'; supported: s"),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "unsupported rotary scaling: here rope_type 'dynamic'; supported: default, linear, ",
        ),
        (
            {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}},
            "unsupported rotary scaling: here rope_type 'longrope'; supported: default, linear, ",
        ),
        (
            {"model_type": "phi3", "partial_rotary_factor": 0.75},
            "unsupported rotary scaling: here partial_rotary_factor 0.75; supported: heads that",
        ),
        (
            {"model_type": "phi3", "rope_scaling": {"type": "yarn", "factor": 2.0}},
            "malformed model config: here (Missing required keys in `rope_parameters` for",
        ),
        (
            {"model_type": "qwen2", "layer_types": ["chunked_attention"] * 3},
            "unsupported architecture: here layer_types 'chunked_attention'; supported: full_",
        ),
        (
            {"model_type": "gemma3_text", "use_bidirectional_attention": True},
            "unsupported architecture: here use_bidirectional_attention True; supported: False",
        ),
        ({"hidden_size": "64"}, "malformed model config: here (TypeError: Field 'hidden_size' exp"),
        ({"hidden_size": 63}, "malformed model config: here (ValueError: The hidden size (63) is"),
        ({"rope_scaling": 5}, "malformed model config: here (TypeError: Field 'rope_parameters'"),
    ],
)
def test_unsupported_configs_are_refused(changed: dict[str, object], message: str) -> None:
    config = {
        "model_type": "llama",
        "vocab_size": 97,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 256,
    }
    assert decoder_config(config, "here").head_dim == 16
    with pytest.raises(UserError) as refusal:
        decoder_config(config | changed, "here")
    assert str(refusal.value).startswith(message)
    assert len(str(refusal.value).splitlines()) == 1


def test_missing_config_key_is_named() -> None:
    with pytest.raises(UserError, match="model config lacks a key: here vocab_size"):
        decoder_config({"model_type": "llama"}, "here")


def test_legacy_spellings_are_read() -> None:
    """As the hub's config.json of Gemma 3 1B says it: a pattern and two bases."""
    sizes = {
        "vocab_size": 97,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 7,
        "num_attention_heads": 4,
    }
    gemma = {
        "model_type": "gemma3_text",
        "sliding_window": 512,
        "sliding_window_pattern": 3,
        "rope_theta": 1000000,
        "rope_local_base_freq": 10000,
        "rope_scaling": None,
    }
    config = decoder_config(sizes | gemma, "here")
    local = LayerKind({"rope_type": "default", "rope_theta": 10000}, 512)
    everywhere = LayerKind({"rope_type": "default", "rope_theta": 1000000})
    layers = (local, local, everywhere) * 2 + (local,)
    assert config.layer_kinds == layers
    assert config.kinds == (local, everywhere)
    assert config.tie_word_embeddings
    mistral = decoder_config(sizes | {"model_type": "mistral"}, "here")
    assert mistral.kinds == (LayerKind({"rope_type": "default", "rope_theta": 1e4}, 4096),)
    llama = decoder_config(sizes | {"model_type": "llama", "sliding_window": 8}, "here")
    assert (llama.layer_kinds, llama.context_tokens, llama.biased) == ((), 2048, ())
