import io
import json
import random
import re
import shutil
from contextlib import redirect_stderr
from pathlib import Path

import pytest
import torch

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.checkpoints.checkpoint import load_tensors
from polybasic.chain.formats.lineage import QUANTIZED_FROM_KEY
from polybasic.chain.formats.origin import ORIGIN_KEY
from polybasic.quantize import distillation
from polybasic.quantize.awq import quantize_target
from polybasic.quantize.distillation import distill_intermediate, packed_rows
from polybasic.quantize.models import load_dequantized, load_target
from polybasic.quantize.quality import compare_models, measure_quality
from polybasic.quantize.settings import DistillSettings, QuantizeSettings
from polybasic.quantize.shared_cache import shared_cache
from tests.checkpoints import write_family

SETTINGS = DistillSettings(num_steps=40, batch_tokens=256, row_tokens=64, learning_rate=2e-2)
SHORT = SETTINGS.model_copy(update={"num_steps": 8})
NUM_TOKENS = 600


def token_rows(num_rows: int, seed: int) -> list[list[int]]:
    """Texts of forty tokens, so that a short training sees what is measured."""
    draw = random.Random(seed)
    return [[draw.randrange(40) for _ in range(draw.randrange(20, 60))] for _ in range(num_rows)]


def write_models(folder: Path, family: str) -> None:
    write_family(folder / "target", family)
    settings = QuantizeSettings(num_calibration_samples=4, calibration_tokens=48)
    quantize_target(folder / "target", token_rows(20, 0), settings, 0, folder / "intermediate")


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """A folder with target and intermediate."""
    folder = tmp_path_factory.mktemp("models")
    write_models(folder, "llama2")
    return folder


def distill(
    models: Path,
    out: Path,
    settings: DistillSettings = SETTINGS,
    seed: int = 0,
    shares_cache: bool = True,
) -> dict:
    return distill_intermediate(
        models / "target",
        models / "intermediate",
        token_rows(300, 1),
        token_rows(20, 2),
        settings,
        NUM_TOKENS,
        seed,
        out,
        shares_cache,
    )


@pytest.fixture(scope="module")
def distilled(models) -> dict[bool, tuple[Path, dict, str]]:
    """With and without the target's cache: folder, summary, and what was reported."""
    found = {}
    for shares_cache in (True, False):
        out, reported = models.with_name(f"shares-{shares_cache}"), io.StringIO()
        with redirect_stderr(reported):
            summary = distill(models, out, shares_cache=shares_cache)
        found[shares_cache] = out, summary, reported.getvalue()
    return found


@pytest.mark.parametrize("shares_cache", [True, False])
def test_it_raises_the_acceptance_on_text_it_never_saw(models, distilled, shares_cache):
    out, summary, reported = distilled[shares_cache]
    assert summary["is_kept"]
    assert summary["acceptance_after"] > summary["acceptance_before"] + 0.005
    assert summary["mean_kl_after"] < 0.95 * summary["mean_kl_before"]
    assert (summary["steps"], summary["num_tokens"]) == (40, NUM_TOKENS)
    assert summary["seconds"] > 0
    assert "after; kept" in reported
    assert re.search(
        r"distillation: 40 of 40  loss \d\.\d{4}  [\d,]+ tokens/s  0:00:00 left", reported
    )
    # as anyone measures the two checkpoints, each with a cache of its own
    for folder, when in ((models / "intermediate", "before"), (out, "after")):
        quality = measure_quality(models / "target", folder, token_rows(20, 2), NUM_TOKENS)
        measured = quality["acceptance"], quality["mean_kl"]
        summarized = summary[f"acceptance_{when}"], summary[f"mean_kl_{when}"]
        assert (measured == summarized) != shares_cache
        assert measured[0] <= summarized[0]


def test_a_chain_gains_more_from_training_with_the_targets_cache(models, distilled):
    gains = []
    for shares_cache in (True, False):
        target, model = load_target(models / "target"), load_dequantized(distilled[shares_cache][0])
        with shared_cache(target, model):
            quality = compare_models(target, model, token_rows(40, 2), 1500)
        gains.append(quality["acceptance"])
    assert gains[0] > gains[1] + 0.002


def test_only_codes_change_and_none_that_make_keys_or_values(models, tmp_path):
    assert distill(models, tmp_path / "out", SHORT)["is_kept"]
    before, after = load_tensors(models / "intermediate"), load_tensors(tmp_path / "out")
    assert list(before) == list(after)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    adapted = ("self_attn.q", "self_attn.o", "mlp.gate", "mlp.up", "mlp.down")
    assert changed == {
        f"model.layers.{layer}.{name}_proj.qweight" for layer in range(3) for name in adapted
    }
    names = {path.name for path in (models / "intermediate").iterdir()}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names
    for name in names - {"model.safetensors"}:
        written = (tmp_path / "out" / name).read_text()
        assert written == (models / "intermediate" / name).read_text()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert QUANTIZED_FROM_KEY in config[ORIGIN_KEY]


@pytest.mark.parametrize("family", ["qwen2", "phi3", "gemma3"])
def test_the_packed_checkpoint_computes_what_was_trained(tmp_path, monkeypatch, family):
    write_models(tmp_path, family)
    token_ids, logits = torch.tensor([token_rows(1, 3)[0]]), []
    measure = distillation.compare_models

    def recording(reference, model, *limits):
        logits.append(model(token_ids).logits.detach())
        return measure(reference, model, *limits) | {"acceptance": len(logits) / 10}

    monkeypatch.setattr(distillation, "compare_models", recording)
    distill(tmp_path, tmp_path / "out", SHORT, shares_cache=False)
    before, after = (load_dequantized(tmp_path / name) for name in ("intermediate", "out"))
    with torch.no_grad():
        assert torch.equal(before(token_ids).logits, logits[0])
        assert torch.equal(after(token_ids).logits, logits[1])
    assert not torch.equal(logits[0], logits[1])


def test_what_does_not_pay_is_not_kept(models, tmp_path, capsys):
    for learning_rate in (0.0, 10.0):
        settings = SHORT.model_copy(update={"learning_rate": learning_rate})
        summary = distill(models, tmp_path / "out", settings)
        assert not summary["is_kept"]
        assert (summary["acceptance_after"] < summary["acceptance_before"]) == (learning_rate > 0)
        assert "does not pay, the intermediate stays as it was" in capsys.readouterr().err
        for path in (models / "intermediate").iterdir():
            assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()


def test_the_same_seed_gives_the_same_bytes(models, tmp_path):
    written = []
    for seed in (0, 0, 1):
        torch.rand(1)
        summary = distill(models, tmp_path / "out", SHORT, seed)
        written.append((summary["acceptance_after"], load_tensors(tmp_path / "out")))
    name = "model.layers.0.mlp.up_proj.qweight"
    assert torch.equal(written[0][1][name], written[1][1][name])
    assert written[0][0] == written[1][0] != written[2][0]


def test_recomputing_layers_changes_nothing_but_the_memory(models, tmp_path):
    recomputing = SHORT.model_copy(update={"recompute_layers": True})
    summaries = [distill(models, tmp_path / "out", each) for each in (SHORT, recomputing)]
    for summary in summaries:
        del summary["seconds"]
    assert summaries[0] == summaries[1]


def test_it_may_replace_the_intermediate(models, tmp_path):
    shutil.copytree(models, tmp_path, dirs_exist_ok=True)
    before = load_tensors(models / "intermediate")
    assert distill(tmp_path, tmp_path / "intermediate", SHORT)["is_kept"]
    after = load_tensors(tmp_path / "intermediate")
    name = "model.layers.0.mlp.up_proj.qweight"
    assert not torch.equal(before[name], after[name])


def test_an_intermediate_of_another_target_is_refused(models, tmp_path):
    write_family(tmp_path / "target", "llama2", seed=1)
    shutil.copytree(models / "intermediate", tmp_path / "intermediate")
    with pytest.raises(UserError, match="intermediate of another target: polybasic"):
        distill(tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_loss_that_is_not_finite_is_refused(models, tmp_path):
    settings = SHORT.model_copy(update={"learning_rate": float("inf")})
    with pytest.raises(UserError, match=r"distillation diverged: loss nan at step 1 of 8"):
        distill(models, tmp_path / "out", settings)
    assert not (tmp_path / "out").exists()


def test_rows_beyond_the_context_are_refused(models, tmp_path):
    settings = DistillSettings(row_tokens=513)
    with pytest.raises(UserError, match=r"rows exceed the context: .*row_tokens 513, .* 512"):
        distill(models, tmp_path / "out", settings)


@pytest.mark.parametrize("is_heldout", [False, True])
def test_foreign_token_ids_are_refused(models, tmp_path, is_heldout):
    rows = [[[1, 2] * 100], [[1, 320] * 100]]
    with pytest.raises(UserError, match="token id outside of the vocabulary: 320, "):
        distill_intermediate(
            models / "target",
            models / "intermediate",
            rows[not is_heldout],
            rows[is_heldout],
            SHORT,
            NUM_TOKENS,
            0,
            tmp_path / "out",
        )


def test_rows_are_joined_in_an_order_of_the_seed():
    rows = [[1, 2, 3], [4, 5], [], [6, 7, 8, 9]]
    packed = packed_rows(rows, 4, seed=0)
    assert [len(row) for row in packed] == [4, 4]
    joined = "".join(str(token) for row in packed for token in row)
    assert sum("".join(map(str, row)) in joined for row in rows if row) >= 2
    assert packed == packed_rows(rows, 4, seed=0)
    assert any(packed_rows(rows, 4, seed) != packed for seed in range(1, 4))


def test_too_little_text_is_refused():
    with pytest.raises(
        UserError,
        match="too little text to distill on: 5 tokens in 2 conversations, one row",
    ):
        packed_rows([[1, 2, 3], [4, 5]], 6, seed=0)


def test_rows_longer_than_a_batch_are_refused():
    with pytest.raises(ValueError, match="row_tokens 512 exceeds batch_tokens 256"):
        DistillSettings(row_tokens=512, batch_tokens=256)
