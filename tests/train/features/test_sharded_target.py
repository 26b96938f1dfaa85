"""A target partitioned over two processes, against the whole one."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from polybasic.chain.base.processes.group import process_group, process_index
from polybasic.train.features.sharded_target import load_sharded_target
from polybasic.train.features.target import load_target
from tests import forked
from tests.checkpoints import write_family

CPU = torch.device("cpu")
FAMILIES = ("llama2", "llama32", "qwen2", "phi3")
"""Of them one with tied embeddings, one with biases and one with fused projections."""
STORED = {"qwen2": torch.bfloat16}
"""Of those that are not stored in float32, in which all are run."""


def token_ids():
    return torch.randint(5, 200, (3, 17), generator=torch.Generator().manual_seed(0))


def documents():
    """Two packed conversations in the first row."""
    return torch.tensor([[0] * 7 + [1] * 10, [0] * 17, [0] * 12 + [-1] * 5])


def measured(target):
    """Features before and after answers, the answers, and the whole matrices."""
    rows = token_ids()
    first = target.features(rows, documents(), (0, 1, 2))
    generated = target.model.generate(
        input_ids=rows,
        attention_mask=torch.ones_like(rows),
        max_new_tokens=9,
        do_sample=False,
        pad_token_id=0,
    )
    return {
        "features": first.states,
        "layers": first.layers,
        "features_again": target.features(rows[:2, :11]).states,
        "generated": generated,
        "lm_head": target.lm_head.weight.clone(),
        "embedding": target.embedding.clone(),
    }


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("targets")
    for family in FAMILIES:
        write_family(root / family, family, dtype=STORED.get(family, torch.float32))
    return [root / family for family in FAMILIES]


def measure(folders, out):
    """As one of two processes: `measured` of each target, and how many weights it holds."""
    with process_group():
        for folder in folders:
            target = load_sharded_target(folder, dtype=torch.float32)
            layers = target.model.model.layers.parameters()
            matrices = [each for each in layers if each.ds_numel > 10_000]
            held = {"held": sum(each.ds_tensor.numel() for each in matrices)}
            held["at_rest"] = sum(each.numel() for each in matrices)
            held["all"] = sum(each.ds_numel for each in matrices)
            place = f"{folder.name}-{process_index()}"
            save_file(measured(target), out / f"{place}.safetensors")
            (out / f"{place}.json").write_text(json.dumps(held))


@pytest.fixture(scope="module")
def sharded(folders, tmp_path_factory):
    out = tmp_path_factory.mktemp("sharded")
    exit_codes = forked.run_two(measure, folders, out, log=out / "log.txt")
    assert exit_codes == [0, 0], (out / "log.txt").read_text()
    return out


@pytest.mark.parametrize("index", [0, 1])
def test_features_and_answers_are_the_whole_targets(folders, sharded, index):
    for folder in folders:
        found = load_file(sharded / f"{folder.name}-{index}.safetensors")
        expected = measured(load_target(folder, CPU, dtype=torch.float32))
        for name, tensor in expected.items():
            assert torch.allclose(found[name], tensor, rtol=1e-5, atol=1e-5), (folder.name, name)
        assert expected["features"].std() > 0.1
        assert expected["layers"].shape == (3, 17, 3 * 128)


def test_each_process_holds_its_half(folders, sharded):
    for folder in folders:
        for index in range(2):
            held = json.loads((sharded / f"{folder.name}-{index}.json").read_text())
            assert held["held"] * 2 == held["all"] > 0
            assert held["at_rest"] == 0
