"""What a seed means to users of a chain, and the script of docs/seeds.md."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from polybasic.deploy import Chain, load_chain
from polybasic.deploy.runtime.chain import Options

PAGE = Path(__file__).parents[3] / "docs" / "seeds.md"
PROMPT = "w5 w9 w2"
SETTINGS: Options = {"temperature": 0.8, "top_p": 0.9, "max_new_tokens": 40}


@pytest.fixture
def chain(tiny_chain: Path) -> Chain:
    return load_chain(tiny_chain, dtype="float32")


def test_the_script_of_the_docs_draws_the_same_from_transformers(
    chain: Chain, tiny_chain: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_chain / "target", dtype=torch.float32).eval()
    model.generation_config.eos_token_id = sorted(chain.stop_tokens)
    scripts = re.findall(r"^```python\n(.*?)^```", PAGE.read_text("utf-8"), re.M | re.S)
    (script,) = (text for text in scripts if "transformers" in text)
    assert "seed=7" in script
    for seed in (7, 8):
        prompt = torch.tensor([chain.encode(PROMPT)])
        named: dict[str, Any] = {"model": model, "prompt": prompt}
        exec(script.replace("seed=7", f"seed={seed}").replace("=64", "=40"), named)
        found = named["tokens"][0, prompt.shape[1] :].tolist()
        assert found == chain.generate(PROMPT, seed=seed, **SETTINGS).token_ids
    assert found != chain.generate(PROMPT, seed=7, **SETTINGS).token_ids


def test_a_drawn_seed_is_stated_and_repeats_the_answer(chain: Chain) -> None:
    drawn = [chain.generate(PROMPT, **SETTINGS) for _ in range(2)]
    seeds = [answer.statistics.seed for answer in drawn]
    assert seeds[0] != seeds[1]
    for answer, seed in zip(drawn, seeds, strict=True):
        again = chain.generate(PROMPT, seed=seed, members=["target"], **SETTINGS)
        assert again.token_ids == answer.token_ids
    assert drawn[0].token_ids != drawn[1].token_ids
    assert chain.generate(PROMPT, max_new_tokens=4).statistics.seed is None


def test_a_seed_asks_for_the_coupled_rule_unless_another_is_given(chain: Chain) -> None:
    coupled = chain.generate(PROMPT, seed=3, **SETTINGS).token_ids
    chain.plan = chain.plan.model_copy(update={"rule": "block"})
    assert chain.generate(PROMPT, seed=3, **SETTINGS).token_ids == coupled
    block = chain.generate(PROMPT, seed=3, rule="block", **SETTINGS).token_ids
    assert block != coupled
    assert chain.generate(PROMPT, seed=3, plan=chain.plan, **SETTINGS).token_ids == block
