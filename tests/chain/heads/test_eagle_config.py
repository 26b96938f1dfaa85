"""config.json of heads of both kinds, written and read."""

from typing import Any

import pytest

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.checkpoints.config import check_feature_layers, head_config
from polybasic.chain.formats.checkpoints.decoder_config import DecoderConfig, HeadConfig
from polybasic.chain.heads.eagle_config import default_feature_layers, eagle3_config, eagle_config

SIZES = DecoderConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=80,
    num_layers=9,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rms_norm_eps=1e-5,
    context_tokens=128,
    tie_word_embeddings=False,
    rope={"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0},
)


def assert_same_layer(head: HeadConfig) -> None:
    assert head.num_layers == 1
    for name in ("vocab_size", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads"):
        assert getattr(head, name) == getattr(SIZES, name)
    for name in ("head_dim", "rms_norm_eps", "context_tokens", "rope"):
        assert getattr(head, name) == getattr(SIZES, name)


def test_an_eagle2_config_is_read_back() -> None:
    head = head_config(eagle_config(SIZES, False, "bfloat16"), "here")
    assert_same_layer(head)
    assert (head.kind, head.feature_layers) == ("eagle2", ())
    assert (head.draft_vocab_size, head.num_draft_tokens) == (None, 64)
    trimmed = head_config(eagle_config(SIZES, False, "bfloat16", 20), "here")
    assert (trimmed.kind, trimmed.num_draft_tokens) == ("eagle2", 20)


def test_an_eagle3_config_is_read_back() -> None:
    content = eagle3_config(SIZES, False, "bfloat16", (2, 4, 6), 20)
    assert content["architectures"] == ["LlamaForCausalLMEagle3"]
    assert content["draft_vocab_size"] == 20
    assert content["target_hidden_size"] == 32
    assert content["eagle_config"] == {
        "use_aux_hidden_state": True,
        "eagle_aux_hidden_state_layer_ids": [2, 4, 6],
    }
    head = head_config(content, "here")
    assert_same_layer(head)
    assert (head.kind, head.feature_layers, head.num_draft_tokens) == ("eagle3", (2, 4, 6), 20)
    assert eagle3_config(SIZES, False, "bfloat16", (2, 4, 6))["draft_vocab_size"] == 64


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"draft_vocab_size": 65}, "malformed head config: here draft_vocab_size 65 of 64"),
        ({"draft_vocab_size": 0}, "draft_vocab_size 0 of 64"),
        ({"draft_vocab_size": "20"}, "draft_vocab_size '20' of 64"),
        ({"target_hidden_size": 48}, "hidden_size 32, target_hidden_size 48"),
        ({"fc_norm": True, "norm_before_fc": True}, "fc_norm and norm_before_fc true"),
        ({"eagle_config": None}, "eagle_aux_hidden_state_layer_ids None"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2]}}, r"\[1, 2\]"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, -3]}}, r"\[1, 2, -3\]"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": "123"}}, "layer_ids 123"),
    ],
)
def test_malformed_configs_are_refused(changes: dict[str, Any], message: str) -> None:
    content = eagle3_config(SIZES, False, "bfloat16", (2, 4, 6), 20)
    with pytest.raises(UserError, match=message):
        head_config(content | changes, "here")


@pytest.mark.parametrize(
    ("num_layers", "expected"),
    [
        (32, (2, 16, 29)),
        (9, (2, 4, 6)),
        (6, (2, 3, 3)),
        (3, (0, 1, 2)),
        (2, (0, 1, 1)),
        (1, (0, 0, 0)),
    ],
)
def test_default_layers_are_eagle_3s_where_there_are_enough(
    num_layers: int, expected: tuple[int, int, int]
) -> None:
    layers = default_feature_layers(num_layers)
    assert layers == expected
    head = head_config(eagle3_config(SIZES, False, "bfloat16", layers), "here")
    check_feature_layers(head, num_layers, "here")


def test_layers_beyond_the_verifiers_are_refused() -> None:
    head = head_config(eagle3_config(SIZES, False, "bfloat16", (2, 4, 6)), "here")
    check_feature_layers(head, 7, "here")
    with pytest.raises(UserError, match="here reads layers 2, 4, 6 of 6"):
        check_feature_layers(head, 6, "here")
