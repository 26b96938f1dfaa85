"""`import polybasic`: what it gives, and that it loads nothing before it is asked."""

import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import polybasic
from polybasic.chain.base.errors import UserError
from polybasic.deploy import load_chain

ROOT = Path(__file__).parent.parent
IMPORTED = """
import sys
import polybasic
print(polybasic.__version__, polybasic.__doc__ is not None, "torch" in sys.modules)
"""


def test_it_gives_what_one_begins_with() -> None:
    assert polybasic.load_chain is load_chain
    assert polybasic.UserError is UserError
    assert all(getattr(polybasic, name) for name in polybasic.__all__)
    with pytest.raises(AttributeError, match="'polybasic' has no attribute 'load_chian'"):
        _ = polybasic.load_chian


def test_it_imports_no_torch() -> None:
    said = subprocess.run([sys.executable, "-c", IMPORTED], capture_output=True, text=True)
    assert said.stdout == f"{version('polybasic')} True False\n", said.stderr


@pytest.mark.parametrize("name", ["torch", "transformers"])
def test_what_is_tested_is_pinned_bounded_and_named(name: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    needed = {
        requirement.name: requirement.specifier
        for requirement in map(Requirement, project["dependencies"])
    }
    pins = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    [pinned] = [pin.partition("==")[2] for pin in pins if pin.startswith(f"{name}==")]
    assert needed[name].contains(pinned)
    assert not needed[name].contains(f"{int(pinned.partition('.')[0]) + 1}.0")
    assert f"{name} {pinned}" in (ROOT / "docs" / "serving.md").read_text("utf-8")


def test_arguments_that_there_are_not_end_in_a_sentence(tiny_chain) -> None:
    chain = polybasic.load_chain(tiny_chain, dtype="float32")
    both = chain.generate("w5", max_tokens=4), chain.generate("w5", max_new_tokens=4)
    assert both[0].token_ids == both[1].token_ids
    assert len(both[0].token_ids) == 4
    with pytest.raises(UserError, match="one setting by two names: max_new_tokens=4, max_tokens=5"):
        chain.generate("w5", max_new_tokens=4, max_tokens=5)
    with pytest.raises(TypeError, match=r"did you mean max_tokens\?"):
        chain.generate("w5", max_token=4)
    with pytest.raises(TypeError, match="unknown argument: beams; there are max_new_tokens, "):
        chain.generate("w5", beams=4)
    with pytest.raises(TypeError, match=r"unknown argument: dytpe; did you mean dtype\?"):
        polybasic.load_chain(tiny_chain, dytpe="float32")
    with pytest.raises(UserError, match=r"one prompt: .* several prompts are asked one by one"):
        chain.generate(["w5", "w9"])
