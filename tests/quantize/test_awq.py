import json
import random
import stat
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.checkpoints import writing_checkpoints
from polybasic.chain.formats.checkpoints.config import read_config
from polybasic.chain.formats.checkpoints.quantization import quantization_config
from polybasic.chain.formats.lineage import weights_digest
from polybasic.chain.kernels.rows import consecutive_rows
from polybasic.chain.model.loading import load_decoder
from polybasic.deploy.runtime.rounds.cache import KeyValueCache
from polybasic.quantize import awq as quantizing
from polybasic.quantize.awq import quantize_target
from polybasic.quantize.models import load_dequantized, load_target
from polybasic.quantize.quality import measure_quality
from polybasic.quantize.settings import QuantizeSettings

VOCAB_SIZE = 256
SETTINGS = QuantizeSettings(num_calibration_samples=8, calibration_tokens=32)


def write_target(folder: Path, model_type: str = "llama", **changes) -> Path:
    """A random checkpoint in bfloat16 with a few large value channels, which AWQ likes to scale."""
    shape = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 64,
        "initializer_range": 0.06,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }
    if model_type == "qwen3":
        shape["head_dim"] = 32
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **{**shape, **changes})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for name, weight in model.named_parameters():
        if name.endswith("v_proj.weight"):
            weight.data[::32] *= 30
    model.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{index}": index for index in range(VOCAB_SIZE)}, "w0"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    return folder


def token_rows(num_rows: int, seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [
        [draw.randrange(VOCAB_SIZE) for _ in range(draw.randrange(8, 60))] for _ in range(num_rows)
    ]


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return write_target(tmp_path_factory.mktemp("models") / "target")


@pytest.fixture(scope="module")
def intermediate(target) -> Path:
    out = target.parent / "intermediate"
    quantize_target(target, token_rows(40), SETTINGS, 0, out)
    return out


def test_checkpoint_is_autoawqs(target, intermediate):
    config = json.loads((intermediate / "config.json").read_text())
    assert config.pop("quantization_config") == quantization_config()
    assert config.pop("dtype") == "float16"
    assert config.pop("polybasic") == {"quantized_from_sha256": weights_digest(target)}
    original = json.loads((target / "config.json").read_text())
    assert config == {key: value for key, value in original.items() if key != "dtype"}

    tensors = load_file(intermediate / "model.safetensors")
    down = "model.layers.1.mlp.down_proj"
    assert tensors[f"{down}.qweight"].shape == (256, 16)
    assert tensors[f"{down}.qzeros"].shape == (2, 16)
    assert tensors[f"{down}.scales"].shape == (2, 128)
    assert f"{down}.weight" not in tensors
    assert {str(tensor.dtype) for tensor in tensors.values()} == {"torch.int32", "torch.float16"}
    unquantized = load_file(target / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"):
        assert torch.equal(tensors[name], unquantized[name].half())


def test_files_are_readable_by_all_and_the_tokenizer_is_there(target, intermediate):
    names = {path.name for path in intermediate.iterdir()}
    assert names == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert {stat.S_IMODE(path.stat().st_mode) for path in intermediate.iterdir()} == {0o644}
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (intermediate / name).read_bytes() == (target / name).read_bytes()


def test_the_same_seed_gives_the_same_bytes(target, intermediate, tmp_path):
    weights = (intermediate / "model.safetensors").read_bytes()
    quantize_target(target, token_rows(40), SETTINGS, 0, tmp_path / "again")
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == weights
    quantize_target(target, token_rows(40), SETTINGS, 1, tmp_path / "other")
    assert (tmp_path / "other" / "model.safetensors").read_bytes() != weights


def test_input_norm_is_rescaled(target, intermediate):
    # the scales of q, k and v are folded into their norm: the two models cannot share norms
    name = "model.layers.0.input_layernorm.weight"
    tensors = [load_file(path / "model.safetensors") for path in (target, intermediate)]
    assert not torch.allclose(tensors[0][name].float(), tensors[1][name].float(), rtol=0.01)


def test_quality_is_a_small_loss(target, intermediate):
    rows = token_rows(20, seed=2)
    quality = measure_quality(target, intermediate, rows, 300)
    assert quality["num_tokens"] == 300
    assert 0 < quality["mean_kl"] < 0.2
    assert 0.5 < quality["top1_agreement"] < 1
    assert quality["perplexity_intermediate"] != quality["perplexity_target"]
    everything = measure_quality(target, intermediate, rows, 10_000)
    assert everything["num_tokens"] == sum(len(row) - 1 for row in rows)


def test_quality_against_a_direct_computation(target, intermediate):
    row = token_rows(1, seed=3)[0]
    quality = measure_quality(target, intermediate, [row], 1000)
    with torch.inference_mode():
        p, q = (
            model(torch.tensor([row])).logits[0, :-1].double().softmax(-1)
            for model in (load_target(target), load_dequantized(intermediate))
        )
    taken = torch.arange(len(row) - 1), torch.tensor(row[1:])
    assert quality["perplexity_target"] == pytest.approx(p[taken].log().mean().neg().exp().item())
    assert quality["mean_kl"] == pytest.approx((p * (p / q).log()).sum(-1).mean().item(), rel=1e-4)
    assert quality["top1_agreement"] == pytest.approx((p.argmax(-1) == q.argmax(-1)).float().mean())
    assert quality["acceptance"] == pytest.approx(torch.minimum(p, q).sum(-1).mean().item())


def test_interrupted_writing_leaves_nothing(target, tmp_path, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(writing_checkpoints, "copy_files", interrupt)
    with pytest.raises(KeyboardInterrupt):
        quantize_target(target, token_rows(40), SETTINGS, 0, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def refusal(target: Path, rows: list[list[int]], settings=SETTINGS) -> str:
    with pytest.raises(UserError) as caught:
        quantize_target(target, rows, settings, 0, target.parent / "refused")
    assert not (target.parent / "refused").exists()
    return str(caught.value)


def test_too_little_data_is_refused(target):
    message = refusal(target, [[1, 2, 3], []])
    assert message.startswith(
        "too little calibration data: 3 tokens in 2 conversations, 256 needed"
    )


def test_foreign_token_ids_are_refused(target):
    rows = [*token_rows(40), [VOCAB_SIZE] * 4000]
    message = refusal(target, rows)
    assert message.startswith("token id outside of the vocabulary: 256, ")


def test_samples_beyond_the_context_are_refused(target):
    settings = QuantizeSettings(num_calibration_samples=1, calibration_tokens=65)
    assert "max_position_embeddings 64" in refusal(target, token_rows(40), settings)


def test_shapes_that_do_not_divide_are_refused(tmp_path):
    target = write_target(tmp_path / "target", intermediate_size=208)
    message = refusal(target, token_rows(40))
    assert "mlp.gate_proj.weight [208, 128] of each layer of" in message
    target = write_target(tmp_path / "narrower", intermediate_size=192)
    settings = SETTINGS.model_copy(update={"group_size": 128})
    message = refusal(target, token_rows(40), settings)
    assert "mlp.down_proj.weight [128, 192] of each layer of" in message
    assert message.endswith("in of 128; quantize.group_size=auto")


def test_a_width_that_128_does_not_divide_gets_smaller_groups(tmp_path):
    shape = {"hidden_size": 192, "num_attention_heads": 6, "num_key_value_heads": 3}
    target, out = write_target(tmp_path / "target", **shape), tmp_path / "out"
    quantize_target(target, token_rows(40), SETTINGS, 0, out)
    config = read_config(out)
    assert config.group_size == 64
    assert load_file(out / "model.safetensors")["model.layers.1.mlp.down_proj.scales"].shape[0] == 4
    ids = torch.tensor(token_rows(1)[0])
    with torch.inference_mode():
        exact, rounded = (
            model(ids[None]).logits[0] for model in (load_target(target), load_dequantized(out))
        )
        decoder = load_decoder(config, torch.float32, torch.device("cpu"), 64)
        cache = KeyValueCache.of(decoder, 64)
        states = decoder.forward(ids, [cache.layers], [consecutive_rows(0, len(ids))])
        found = decoder.logits(states)
    # the runtime multiplies by the codes that autoawq packed; its rows are rounded, too
    assert (found - rounded).norm() < 0.03 * rounded.norm()
    assert (exact - rounded).norm() < 0.5 * exact.norm()


def test_quantized_target_is_refused(intermediate):
    assert refusal(intermediate, token_rows(40)).startswith("target is quantized already")


def test_unknown_family_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    assert refusal(tmp_path, token_rows(40)).startswith(
        "unsupported architecture: model_type 'mamba' in"
    )


def test_missing_checkpoint_is_refused(tmp_path):
    assert refusal(tmp_path / "nowhere", token_rows(40)).startswith("model config not found")


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.0.mlp.up_proj.weight"])
def test_weights_beyond_float16_are_refused_before_the_search(tmp_path, monkeypatch, name):
    target = write_target(tmp_path / "target")
    tensors = load_file(target / "model.safetensors")
    tensors[name].view(-1)[3] = 1e6
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    monkeypatch.setattr(quantizing, "search_and_round", None)
    message = refusal(target, token_rows(40))
    assert message.startswith(f"weight does not fit float16: {name} in {target} reaches ")


def test_folded_weights_beyond_float16_are_refused(target, monkeypatch):
    def overflow(model, rows, group_size):
        model.model.layers[1].input_layernorm.weight.data[0] = 1e5

    monkeypatch.setattr(quantizing, "search_and_round", overflow)
    message = refusal(target, token_rows(40))
    assert "model.layers.1.input_layernorm.weight" in message


def test_missing_weight_is_refused(target, intermediate, tmp_path):
    tensors = load_file(intermediate / "model.safetensors")
    del tensors["model.layers.1.input_layernorm.weight"]
    (tmp_path / "config.json").write_text((intermediate / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(
        UserError, match=r"weight missing: model\.layers\.1\.input_layernorm\.weight"
    ):
        measure_quality(target, tmp_path, token_rows(5), 100)


def test_quality_without_text_is_refused(target, intermediate):
    with pytest.raises(UserError, match="no held-out text"):
        measure_quality(target, intermediate, [[1], []], 100)
