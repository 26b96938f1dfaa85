import pytest
import torch

from polybasic.quantize.models import load_target
from polybasic.quantize.shared_cache import shared_cache
from tests.checkpoints import DISTINCT, write_family

TOKEN_IDS = torch.tensor(
    [[(7 * row + 3 * token * token) % 250 for token in range(40)] for row in (1, 2)]
)


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKEN_IDS, use_cache=False).logits


@pytest.mark.parametrize("family", DISTINCT)
def test_a_copy_computes_what_the_target_does(tmp_path, family):
    """Masks with windows, soft-capping and head sizes of all families, rows beyond the window."""
    write_family(tmp_path, family)
    target, copy = load_target(tmp_path), load_target(tmp_path)
    expected, implementation = logits(target), target.config._attn_implementation
    with shared_cache(target, copy):
        assert torch.allclose(logits(target), expected, atol=1e-5)
        assert torch.allclose(logits(copy), expected, atol=1e-5)
    assert target.config._attn_implementation == implementation
    assert torch.equal(logits(target), expected)
    assert torch.equal(logits(copy), expected)


@pytest.mark.parametrize("family", ["llama2", "phi3", "gemma3"])
def test_past_tokens_have_the_targets_keys_and_values_and_each_token_its_own(tmp_path, family):
    """Against passes over a cache: the target fills it, the copy then adds the last token."""
    write_family(tmp_path / "target", family)
    write_family(tmp_path / "other", family, seed=1)
    target, other = load_target(tmp_path / "target"), load_target(tmp_path / "other")
    with shared_cache(target, other):
        logits(target)
        shared = logits(other)
    for num_past in (1, 17, 39):
        with torch.no_grad():
            cache = target(TOKEN_IDS[:, :num_past], use_cache=True).past_key_values
            expected = other(TOKEN_IDS[:, num_past : num_past + 1], past_key_values=cache).logits
        assert torch.allclose(shared[:, num_past], expected[:, 0], atol=1e-4)
    assert not torch.allclose(shared, logits(other), atol=1e-2)


def test_gradients_stay_out_of_the_target(tmp_path):
    write_family(tmp_path, "llama2")
    target, copy = load_target(tmp_path), load_target(tmp_path)
    with shared_cache(target, copy):
        target(TOKEN_IDS, use_cache=False)
        copy(TOKEN_IDS, use_cache=False).logits.sum().backward()
    assert copy.model.layers[0].self_attn.k_proj.weight.grad.abs().max() > 0
    assert all(parameter.grad is None for parameter in target.parameters())
