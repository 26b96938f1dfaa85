"""Models that compute no numbers, and configs that would make them."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from polybasic.chain.formats.lineage import weights_digest
from polybasic.deploy import load_chain
from polybasic.deploy.runtime.rounds.sampling import (
    NotFiniteError,
    RandomSampler,
    Sampling,
    make_sampler,
)
from polybasic.deploy.runtime.rounds.warping import Prefixes
from tests.attacks import outcomes
from tests.attacks.test_files import accept

CONFIGS: list[tuple[str, Any]] = [
    ("rms_norm_eps", math.nan),
    ("rms_norm_eps", -1),
    ("rms_norm_eps", "1"),
    ("rope_theta", 0),
    ("rope_theta", math.nan),
    ("rope_theta", -1e4),
    ("rope_parameters", {"rope_type": "linear", "factor": 0, "rope_theta": 1e4}),
    ("rope_parameters", {"rope_type": "default", "rope_theta": math.inf}),
    ("vocab_size", 10**11),
    ("vocab_size", 0),
    ("hidden_size", -128),
    ("hidden_size", 10**12),
    ("intermediate_size", 2.5),
    ("num_attention_heads", 0),
    ("num_key_value_heads", 0),
    ("num_key_value_heads", 3),
    ("num_hidden_layers", 10**9),
    ("max_position_embeddings", 0),
    ("max_position_embeddings", 10**15),
    ("max_position_embeddings", math.nan),
    ("head_dim", -32),
    ("hidden_act", ["silu"]),
]
NAN_IN = [
    ("target", "model.embed_tokens.weight", "embedding of target"),
    ("target", "model.layers.0.mlp.down_proj.weight", "layer 0 of target"),
    ("target", "model.layers.1.self_attn.o_proj.weight", "last layer or norm of target"),
    ("target", "lm_head.weight", "output projection of target"),
    ("intermediate", "model.layers.0.mlp.down_proj.scales", "layer 0 of intermediate"),
]


@pytest.mark.parametrize(("key", "value"), CONFIGS)
def test_configs_are_refused(tiny_chain: Path, key: str, value: Any) -> None:
    path = tiny_chain / "target" / "config.json"
    config = json.loads(path.read_text())
    if key == "rope_theta":
        config["rope_parameters"] = {"rope_type": "default", "rope_theta": value}
    config[key] = value
    path.write_text(json.dumps(config))
    accept(tiny_chain)
    assert outcomes.of_command("verify", tiny_chain)
    assert outcomes.of_command("generate", tiny_chain, "-p", "w1", "--max-new-tokens", 2)


@pytest.mark.parametrize("kernels", ["native", "eager", "device"])
@pytest.mark.parametrize(
    ("member", "name", "told"), NAN_IN, ids=lambda argument: str(argument)[-24:]
)
def test_nan_ends_the_answer_and_names_its_origin(
    tiny_chain: Path, member: str, name: str, told: str, kernels: str, monkeypatch
) -> None:
    monkeypatch.setenv("POLYBASIC_KERNELS", kernels)
    path = tiny_chain / member / "model.safetensors"
    tensors = load_file(path)
    tensors[name].view(-1)[:] = math.nan
    save_file(tensors, path, {"format": "pt"})
    for made, origin in (("intermediate", "quantized_from_sha256"), ("draft", "target_sha256")):
        made_by = tiny_chain / made / "config.json"
        lineage = {"polybasic": {origin: weights_digest(tiny_chain / "target")}}
        made_by.write_text(json.dumps(json.loads(made_by.read_text()) | lineage))
    accept(tiny_chain)
    chain = load_chain(tiny_chain, dtype="float32")
    for options in ({}, {"temperature": 1.0, "seed": 1}, {"temperature": 1.0, "rule": "block"}):
        asked: Any = {"max_new_tokens": 8, **options}
        line = outcomes.of_call(lambda asked=asked: chain.generate("w1 w2 w3", **asked))
        assert line is not None
        assert told in line


def test_without_nan_the_same_chain_answers(tiny_chain: Path) -> None:
    accept(tiny_chain)
    assert outcomes.of_command("generate", tiny_chain, "-p", "w1", "--max-new-tokens", 2) is None


@pytest.mark.parametrize("number", [math.nan, math.inf])
@pytest.mark.parametrize("rule", ["greedy", "token"])
def test_one_such_logit_is_enough(number: float, rule: str) -> None:
    logits, prefixes = torch.zeros(3, 100), Prefixes([1], [[], [], []])
    sampling = Sampling(0.0 if rule == "greedy" else 1.0)
    sampler = make_sampler(sampling, torch.device("cpu"), 1)
    sampler.draw(sampler.distributions(logits, prefixes), 0)
    logits[1, 70] = number
    with pytest.raises(NotFiniteError):
        sampler.draw(sampler.distributions(logits, prefixes), 0)
    assert isinstance(sampler, RandomSampler) == (rule != "greedy")
