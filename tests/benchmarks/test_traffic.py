"""Bytes of passes and drafts, against sums by hand over the tiny chain's shapes.

One of its layers has 147,456 weights in its linears: 128 x 128 for q and o, 64 x 128 for k and v,
256 x 128 for gate and up, 128 x 256 for down.
"""

import dataclasses
from pathlib import Path

import pytest

from polybasic.chain.formats.checkpoints.config import read_config
from polybasic.chain.formats.checkpoints.decoder_config import LayerKind
from polybasic.deploy import Chain, load_chain
from tests.benchmarks.scripts import load_script

traffic = load_script("traffic")

LINEARS = 147_456
NORM = 128 * 2


@pytest.fixture
def chain(tiny_chain: Path) -> Chain:
    return load_chain(tiny_chain, dtype="bfloat16")


@pytest.mark.parametrize(("context", "rows"), [(16, 1), (40, 6)])
def test_dense_pass_by_hand(chain: Chain, context: int, rows: int) -> None:
    moved = traffic.member_pass(chain, "target", context, rows)
    assert moved.weights == 2 * (2 * LINEARS + 2 * NORM) + NORM
    assert moved.lm_head == 64 * 128 * 2
    assert moved.cache == 2 * (2 * 2 * 32 * 2) * (context + rows), "keys and values of two heads"
    assert moved.embeddings == rows * 128 * 2
    assert moved.total == moved.weights + moved.lm_head + moved.cache + moved.embeddings


def test_four_bits_are_codes_with_a_scale_and_an_offset_a_group(chain: Chain) -> None:
    groups = 4 * 128 + 2 * 64 + 2 * 256  # `down` has two groups for each of its 128 outputs
    assert groups * 128 == LINEARS
    moved = traffic.member_pass(chain, "intermediate", 16, 1)
    assert moved.weights == 2 * (LINEARS // 2 + 4 * groups + 2 * NORM) + NORM
    dense = traffic.member_pass(chain, "target", 16, 1)
    assert moved.cache == dense.cache
    assert moved.lm_head == 64 * 128 * 34 / 32, "8 bits, and two bytes of scale for 32 of them"


def test_draft_reads_the_head_once_a_level(chain: Chain) -> None:
    moved = traffic.member_draft(chain, "draft", context=16, depth=3, top_k=2)
    rounded = 0.5 + 3 / 64  # 4 bits, and three bytes for 64 of them
    assert moved.weights == 3 * (rounded * LINEARS + NORM + 128 * 256 * rounded)
    assert moved.lm_head == 3 * 64 * 128 * rounded
    assert moved.cache == 3 * (2 * 2 * 32 * 2) * (16 + 2)
    assert moved.embeddings == 3 * 2 * 128 * 2
    trimmed = traffic.head_draft(chain.engine.models.target.config, "eagle2", 8, 2, 16, 3, 2)
    assert trimmed.lm_head == 3 * 8 * 128 * 2, "of eight tokens that can be drafted"


def test_eagle3_head_fuses_features_once(chain: Chain) -> None:
    config = chain.engine.models.target.config
    shallow, deep = (
        traffic.head_draft(config, "eagle3", 64, 2, 16, depth, 2).weights for depth in (1, 2)
    )
    wider = 2 * 128 * (128 + 64 + 64)  # attention reads embedding and feature side by side
    assert deep - shallow == 2 * LINEARS + wider + 3 * NORM
    assert shallow - (deep - shallow) == 3 * 128 * 128 * 2


def test_layers_with_a_window_read_no_more_than_it(tiny_target: Path) -> None:
    config = read_config(tiny_target).decoder
    kinds = (LayerKind(config.rope), LayerKind(config.rope, window=8))
    config = dataclasses.replace(config, layer_kinds=kinds)
    moved = traffic.decoder_pass(config, "decoder", 2, 40, 3)
    assert moved.cache == (2 * 2 * 32 * 2) * ((40 + 3) + (7 + 3))
    short = traffic.decoder_pass(config, "decoder", 2, 5, 3)
    assert short.cache == 2 * (2 * 2 * 32 * 2) * (5 + 3)


def test_biases_that_the_config_asks_for_count(tiny_target: Path) -> None:
    config = read_config(tiny_target).decoder
    biased = dataclasses.replace(config, biased=("q_proj", "k_proj", "v_proj"))
    plain, more = (traffic.layer_bytes(each, "decoder", 2) for each in (config, biased))
    assert more - plain == 2 * (128 + 64 + 64)
