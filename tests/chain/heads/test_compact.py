"""Heads in 8 bits: as large as they may be, and as near to the head as their steps allow."""

from pathlib import Path

import pytest
import torch

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.checkpoints.checkpoint import load_tensors
from polybasic.chain.heads.compact import compacted, expanded
from polybasic.chain.heads.export import export_compact
from polybasic.chain.heads.importing import import_head
from polybasic.recipes.cli import main as cli
from tests.conftest import ChainParts

EMBEDDING = "embed_tokens.weight"


def test_an_exported_head_is_imported_again(tiny_chain: Path, tmp_path: Path) -> None:
    folder = export_compact(tiny_chain, None, tmp_path / "small", None)
    kept, stored = load_tensors(folder), load_tensors(tiny_chain / "draft")
    stored[EMBEDDING] = load_tensors(tiny_chain / "target")[f"model.{EMBEDDING}"].bfloat16()
    assert EMBEDDING not in kept
    assert {
        tensor.dtype for tensor in kept.values() if tensor.dim() == 2 and len(tensor.T) > 1
    } == {torch.int8}
    summary = import_head(folder, tiny_chain / "target", tmp_path / "head")
    assert (summary["kind"], summary["dtype"]) == ("eagle2", "bfloat16")
    again = load_tensors(tmp_path / "head")
    assert again.keys() == stored.keys()
    for name, weight in stored.items():
        if weight.dim() == 2 and name != EMBEDDING:
            step = weight.float().abs().amax(dim=1, keepdim=True) / 127
            # half a step, and the rounding of scale and product to bfloat16
            away = (again[name].float() - weight.float()).abs()
            assert (away <= 0.51 * step + 2**-8 * weight.float().abs() + 2**-7 * step).all()
            assert away.any()
        else:
            assert torch.equal(again[name], weight)
    # what was rounded once stays as it is
    twice = expanded(compacted(again), "again")
    assert all(torch.equal(twice[name], again[name]) for name in twice)


def test_rows_of_zeros_stay_zeros() -> None:
    weight = torch.tensor([[0.0, 0.0], [1.0, -0.5]], dtype=torch.float16)
    found = expanded(compacted({"fc.weight": weight}), "here")["fc.weight"]
    assert found.dtype == torch.float16
    assert torch.equal(found[0], weight[0])
    torch.testing.assert_close(found[1], weight[1], atol=0.005, rtol=0)


@pytest.mark.parametrize("change", ["no matrix", "another shape", "no whole numbers"])
def test_a_scale_without_its_matrix_is_refused(change: str) -> None:
    tensors = compacted({"fc.weight": torch.randn(4, 4)})
    if change == "no matrix":
        del tensors["fc.weight"]
    elif change == "another shape":
        tensors["fc.weight_scale"] = torch.ones(3, 1)
    else:
        tensors["fc.weight"] = torch.randn(4, 4)
    with pytest.raises(UserError, match=r"scale without a matrix of 8 bits: fc\.weight_scale in x"):
        expanded(tensors, "x")


def test_the_command_says_what_comes_next(
    tiny_chain_parts: ChainParts, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_chain_parts.package(tmp_path / "chain")
    out = tmp_path / "small"
    for _ in range(2):  # an export is replaced
        with pytest.raises(SystemExit) as ended:
            cli.main(["export", str(tmp_path / "chain"), "--to", "int8", "--out", str(out)])
        assert not ended.value.code
    said = capsys.readouterr()
    assert said.out.splitlines()[-1] == str(out)
    assert f"draft.model={out}" in said.err
    other = tmp_path / "others"
    other.mkdir()
    (other / "mine.txt").touch()
    with pytest.raises(UserError, match="would replace something that is no export"):
        export_compact(tmp_path / "chain", None, other, None)
