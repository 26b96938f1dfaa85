"""Growth of chains of published models: with tied embeddings, in groups of 64, of a GGUF file."""

from pathlib import Path

import pytest

from polybasic.chain.formats.checkpoints.config import read_config
from polybasic.chain.formats.manifest import read_manifest
from polybasic.chain.formats.verify import check_chain
from polybasic.deploy import load_chain
from tests.benchmarks.growth.growing import (
    assert_moved,
    assert_same,
    chain,
    library_logits,
    runtime_logits,
    shapes,
    write_tied_parts,
)
from tests.conftest import VOCAB_SIZE, ChainParts

GrownShape = shapes.GrownShape
TIED_CASES = {
    "wider": GrownShape(3, 320, 448, 10, 5, 32),
    "heads twice as wide, copied": GrownShape(3, 320, 448, 10, 10, 64, VOCAB_SIZE - 20),
    "larger vocabulary": GrownShape(3, 320, 448, 10, 5, 64, 96),
}


@pytest.fixture(scope="module")
def tied_parts(tmp_path_factory: pytest.TempPathFactory) -> ChainParts:
    return write_tied_parts(tmp_path_factory.mktemp("tied"))


@pytest.mark.parametrize("name", TIED_CASES)
def test_a_tied_target_in_groups_of_64_is_grown(
    name: str, tied_parts: ChainParts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # native kernels round what 4-bit weights are multiplied with
    monkeypatch.setenv("POLYBASIC_KERNELS", "eager")
    small, grown, shape = tmp_path / "chain", tmp_path / "grown", TIED_CASES[name]
    tied_parts.package(small)
    chain.grow_chain(small, shape, name, grown)
    members = check_chain(grown).manifest.members
    for member in members[:2]:
        assert read_config(grown / member.name).decoder.num_kv_heads == shape.num_kv_heads
        before, after = (runtime_logits(folder / member.name) for folder in (small, grown))
        assert after.shape[1] == max(VOCAB_SIZE, shape.vocab_size)
        assert_same(before, after)
    assert_same(library_logits(small / "target"), library_logits(grown / "target"))
    assert_moved(tied_parts, shape, grown)
    assert members[1].group_size == read_config(grown / "intermediate").group_size == 64
    answers = [
        load_chain(folder, dtype="float32").generate("w5", max_new_tokens=24, temperature=0.0)
        for folder in (small, grown)
    ]
    assert answers[0].token_ids == answers[1].token_ids
    assert answers[0].statistics.forward_passes == answers[1].statistics.forward_passes
    # the weights are in no file that the small chain's were read from
    assert [member.gguf is None for member in read_manifest(small).members] == [False, False, True]
    assert [member.gguf for member in members] == [None, None, None]
