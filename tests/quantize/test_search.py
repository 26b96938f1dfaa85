"""AWQ's search with autoawq: what is folded where, each layer's own arguments, its import."""

import random
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from awq.quantize.quantizer import AwqQuantizer
from transformers import PreTrainedModel
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.checkpoints.checkpoint import load_tensors
from polybasic.quantize import search
from polybasic.quantize.awq import quantize_target
from polybasic.quantize.models import load_target
from polybasic.quantize.search import _Quantizer, search_and_round
from polybasic.quantize.settings import QuantizeSettings
from tests.checkpoints import DISTINCT, VOCAB_SIZE, write_family

SETTINGS = QuantizeSettings(num_calibration_samples=4, calibration_tokens=48)


def token_rows(num_rows: int, seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(VOCAB_SIZE) for _ in range(48)] for _ in range(num_rows)]


@pytest.fixture
def unrounded(monkeypatch) -> None:
    """Let the search scale, but neither clip nor round."""
    monkeypatch.setattr(search._Quantizer, "_apply_quant", lambda *_: None)
    monkeypatch.setattr(search._Quantizer, "_search_best_clip", lambda *_: [])


def scaled_difference(target: Path) -> tuple[float, float]:
    """Largest change of a logit, and of a weight, by the folding of scales."""
    exact, model = load_target(target), load_target(target)
    search_and_round(model, token_rows(4), 128)
    token_ids = torch.tensor(token_rows(2, 3))
    with torch.inference_mode():
        logits = (model(token_ids).logits - exact(token_ids).logits).abs().max().item()
    return logits, weight_change(exact, model)


def weight_change(exact: PreTrainedModel, model: PreTrainedModel) -> float:
    parameters = zip(exact.parameters(), model.parameters(), strict=True)
    return max((after - before).abs().max().item() for before, after in parameters)


@pytest.mark.usefixtures("unrounded")
@pytest.mark.parametrize("family", DISTINCT)
def test_folding_the_scales_changes_weights_and_no_logit(tmp_path, family):
    write_family(tmp_path, family)
    logits, weights = scaled_difference(tmp_path)
    assert logits < 1e-4
    assert weights > 0.05


@pytest.mark.usefixtures("unrounded")
def test_folding_into_up_projections_divides_their_biases(tmp_path):
    write_family(tmp_path, "llama2", mlp_bias=True, attention_bias=True)
    assert "model.layers.0.mlp.up_proj.bias" in load_tensors(tmp_path)
    assert scaled_difference(tmp_path)[0] < 1e-4


@pytest.mark.usefixtures("unrounded")
def test_gemmas_norms_are_not_divided_as_llamas(tmp_path, monkeypatch):
    write_family(tmp_path, "gemma3")
    monkeypatch.setattr(search.autoawq_scale, "Gemma2RMSNorm", ())
    assert scaled_difference(tmp_path)[0] > 0.1


def test_gemmas_norms_lose_nothing_in_bfloat16(tmp_path, monkeypatch):
    """Engines in bfloat16 read them so; the control stores the scales as they were found."""
    write_family(tmp_path / "target", "gemma2", num_hidden_layers=1)
    name = "model.layers.0.pre_feedforward_layernorm.weight"
    norms = []
    for out in ("storable", "found"):
        quantize_target(tmp_path / "target", token_rows(6), SETTINGS, 0, tmp_path / out)
        norms.append(load_tensors(tmp_path / out)[name])
        monkeypatch.setattr(search, "_storable_scales", lambda norm, scales: scales)
    before = load_tensors(tmp_path / "target")[name].half()
    assert [torch.equal(norm, before) for norm in norms] == [False, False]
    assert [torch.equal(norm, norm.bfloat16().half()) for norm in norms] == [True, False]
    assert torch.allclose(norms[0], norms[1], atol=5e-3)


def test_scales_that_a_norm_cannot_hold_are_left_out():
    norm = Gemma3RMSNorm(4)
    norm.weight.data = torch.tensor([0.0, 0.0, -1.0, 1.0])
    found = search._storable_scales(norm, torch.tensor([2.0, 1e6, 2.0, 4.0]))
    assert found.tolist() == [2.0, 1.0, 1.0, 4.0]


@pytest.mark.parametrize("changed", ["position_embeddings", "attention_mask"])
def test_layers_that_autoawq_would_miscalibrate_are_refused(tmp_path, monkeypatch, changed):
    honest = _Quantizer.init_quant

    def with_the_first_layers(self, **limits):
        layers, arguments, inputs = honest(self, **limits)
        for layer in layers:
            self.layer_arguments[layer][changed] = arguments[changed]
        return layers, arguments, inputs

    write_family(tmp_path / "target", "gemma3")
    monkeypatch.setattr(_Quantizer, "init_quant", with_the_first_layers)
    with pytest.raises(UserError, match="autoawq misreads this model: model_type gemma3_text"):
        quantize_target(tmp_path / "target", token_rows(6), SETTINGS, 0, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


def test_the_clip_search_is_autoawqs():
    quantizer = object.__new__(_Quantizer)
    quantizer.group_size, quantizer.w_bit, quantizer.zero_point = 128, 4, True
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(64, 256, generator=generator) ** 3
    features = torch.randn(600, 256, generator=generator)
    ours = quantizer._compute_best_clip(weight, features)
    theirs = AwqQuantizer._compute_best_clip(quantizer, weight, features)
    assert ours.shape == theirs.shape
    assert torch.allclose(ours, theirs)
    assert (ours < weight.view(64, 2, 128).abs().amax(2, keepdim=True)).any()


@pytest.mark.proof
def test_importing_is_quiet_and_leaves_the_warning_filters():
    code = """
import warnings
import polybasic.quantize.search
assert ("default", None, DeprecationWarning, None, 0) not in warnings.filters
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_autoawq_not_installed_is_reported(monkeypatch):
    monkeypatch.setitem(sys.modules, "awq.models._config", None)
    with pytest.raises(UserError, match=r"autoawq cannot be imported: .*polybasic\[quantize\]"):
        runpy.run_path(search.__file__)


@pytest.mark.parametrize("quantizer", [_Quantizer, AwqQuantizer], ids=["ours", "autoawq's"])
def test_the_search_for_scales_leaves_the_weights_alone(quantizer: type) -> None:
    """The control shows that autoawq's own search on a CPU leaves scaled weights."""
    torch.manual_seed(0)
    linear = torch.nn.Linear(256, 64, bias=False)
    linear.weight.data *= torch.rand(256) + 0.1
    before, x = linear.weight.detach().clone(), torch.randn(2, 32, 256)
    search = quantizer.__new__(quantizer)
    search.duo_scaling, search.w_bit, search.group_size, search.zero_point = True, 4, 128, True
    search.max_chunk_memory, search.n_parallel_calib_samples = 1 << 30, None
    with torch.no_grad():
        scales = search._search_best_scale(linear, linear, [linear], x)[2]
    assert scales.shape == (256,)
    assert torch.equal(linear.weight, before) == (quantizer is _Quantizer)
