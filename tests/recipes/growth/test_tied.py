"""Growth of chains as recipes/smollm2-135m.yaml makes them: of a GGUF file, with tied embeddings,
4-bit groups of 64 and a head over a part of the vocabulary."""

from pathlib import Path

import pytest
import torch

from polybasic.chain.formats.checkpoint import load_tensors
from polybasic.chain.formats.config import read_config
from polybasic.chain.formats.lineage import weights_digest
from polybasic.chain.formats.manifest import read_manifest
from polybasic.chain.formats.verify import check_chain
from polybasic.deploy import load_chain
from polybasic.recipes.growth.chain import grow_chain
from polybasic.recipes.growth.shapes import GrownShape
from tests.conftest import VOCAB_SIZE, ChainParts, write_draft, write_target
from tests.conftest import write_intermediate as write_int4
from tests.head_kinds import trim
from tests.recipes.growth.growing import (
    EPS,
    assert_moved,
    assert_same,
    change_config,
    library_logits,
    runtime_logits,
)

TIED_CASES = {
    "wider": GrownShape(3, 320, 448, 10, 5, 32),
    "heads twice as wide, copied": GrownShape(3, 320, 448, 10, 10, 64, VOCAB_SIZE - 20),
    "larger vocabulary": GrownShape(3, 320, 448, 10, 5, 64, 96),
}
GGUF = {"gguf": {"files": {"small.gguf": "0" * 64}, "types": {"Q4_1": 14}}}


@pytest.fixture(scope="module")
def tied_parts(tmp_path_factory: pytest.TempPathFactory) -> ChainParts:
    folder = tmp_path_factory.mktemp("tied")
    parts = ChainParts(*(folder / name for name in ("target", "intermediate", "draft")))
    write_target(
        parts.target,
        hidden_size=192,
        intermediate_size=320,
        num_attention_heads=6,
        num_key_value_heads=3,
        tie_word_embeddings=True,
        rms_norm_eps=EPS,
    )
    change_config(parts.target, {"polybasic": GGUF})
    assert "lm_head.weight" not in load_tensors(parts.target)
    write_int4(parts.intermediate, parts.target, 64)
    origin = {"quantized_from_sha256": weights_digest(parts.target)}
    change_config(parts.intermediate, {"polybasic": origin | GGUF})
    write_draft(parts.draft, parts.target)
    trim(parts.draft, torch.arange(0, VOCAB_SIZE, 3))
    return parts


@pytest.mark.parametrize("name", TIED_CASES)
def test_a_tied_target_in_groups_of_64_is_grown(
    name: str, tied_parts: ChainParts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # native kernels round what 4-bit weights are multiplied with
    monkeypatch.setenv("POLYBASIC_KERNELS", "eager")
    small, grown, shape = tmp_path / "chain", tmp_path / "grown", TIED_CASES[name]
    tied_parts.package(small)
    grow_chain(small, shape, name, grown)
    members = check_chain(grown).manifest.members
    for member in members[:2]:
        assert read_config(grown / member.name).decoder.num_kv_heads == shape.num_kv_heads
        before, after = (runtime_logits(chain / member.name) for chain in (small, grown))
        assert after.shape[1] == max(VOCAB_SIZE, shape.vocab_size)
        assert_same(before, after)
    assert_same(library_logits(small / "target"), library_logits(grown / "target"))
    assert_moved(tied_parts, shape, grown)
    assert members[1].group_size == read_config(grown / "intermediate").group_size == 64
    answers = [
        load_chain(chain, dtype="float32").generate("w5", max_new_tokens=24, temperature=0.0)
        for chain in (small, grown)
    ]
    assert answers[0].token_ids == answers[1].token_ids
    assert answers[0].statistics.forward_passes == answers[1].statistics.forward_passes
    # the weights are in no file that the small chain's were read from
    assert [member.gguf is None for member in read_manifest(small).members] == [False, False, True]
    assert [member.gguf for member in members] == [None, None, None]
