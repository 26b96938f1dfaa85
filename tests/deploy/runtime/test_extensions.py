"""Answers of chains with a family and a kind of heads that another package adds."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from polybasic.chain.formats.checkpoints.config import read_config
from polybasic.chain.kernels.executor import Executor
from polybasic.chain.model.loading import load_decoder
from polybasic.deploy import load_chain
from polybasic.deploy.runtime.rounds.cache import KeyValueCache
from polybasic.deploy.runtime.rounds.verifier import Verifier
from tests.extensions import FAMILY, HEAD, installed, write_toy_head, write_toy_model

PROMPTS = ["w1 w2 w3", "w9 w4 w4 w7 w1", "w5"]


def greedy(chain: Any, prompt: str, members: tuple[str, ...]) -> list[int]:
    token_ids = chain.generate(prompt, max_new_tokens=24, temperature=0.0, members=members)
    return list(token_ids.token_ids)


@torch.inference_mode()
@pytest.mark.parametrize("kernels", ["native", "eager", "device"])
def test_a_family_of_another_package_runs_on_every_executor(
    kernels: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POLYBASIC_KERNELS", kernels)
    with installed(tmp_path / "site", FAMILY):
        write_toy_model(tmp_path / "model")
        reference = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
        file = read_config(tmp_path / "model")
        decoder = load_decoder(file, torch.float32, torch.device("cpu"), 64)
    tokens = list(range(3, 30))
    expected = reference.eval()(torch.tensor([tokens])).logits[0]

    def logits(model: Executor) -> torch.Tensor:
        verifier = Verifier("toy", model, KeyValueCache.of(model, 64))
        return verifier.logits(verifier.read(tokens))

    torch.testing.assert_close(logits(decoder), expected, rtol=0, atol=1e-5 * expected.abs().max())
    unscaled = decoder.over(replace(decoder.weights, embedding_scale=None))
    assert (logits(unscaled) - expected).abs().max() > 1e-2 * expected.abs().max()


@pytest.mark.parametrize("kernels", ["native", "device"])
def test_a_head_of_another_package_drafts(
    kernels: str,
    tiny_chain_parts: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("POLYBASIC_KERNELS", kernels)
    intermediate, draft = tiny_chain_parts.parts
    parts = [intermediate, replace(draft, kind="toy")]
    with installed(tmp_path / "site", HEAD):
        from toy.drafting import ToyDrafter

        write_toy_head(tiny_chain_parts.draft, tiny_chain_parts.target)
        tiny_chain_parts.package(tmp_path / "chain", parts=parts)
        chain = load_chain(tmp_path / "chain", dtype="float32")
        for prompt in PROMPTS:
            alone = greedy(chain, prompt, ("target",))
            for members in (("target", "draft"), ("target", "intermediate", "draft")):
                before = ToyDrafter.num_seen
                assert greedy(chain, prompt, members) == alone
                assert ToyDrafter.num_seen - before >= len(alone)
