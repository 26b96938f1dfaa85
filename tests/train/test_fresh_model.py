"""A model copies from its prompt before its first step, by the heads that are written for it."""

from types import SimpleNamespace
from typing import Any

import torch

from polybasic.train.fresh_model import build_model
from polybasic.train.settings import ScratchModelSettings

SETTINGS = ScratchModelSettings(num_layers=24, first_layers=6)
VOCAB_SIZE = 1000
TOKENIZER: Any = SimpleNamespace(bos_token_id=1, eos_token_id=2, pad_token_id=0)


def share_copied(model: Any) -> float:
    """Of random tokens that are said again, those that the model foretells."""
    draw = torch.Generator().manual_seed(0)
    said = torch.randint(VOCAB_SIZE, (8, 40), generator=draw)
    with torch.no_grad():
        best = model(torch.cat((said, said), dim=1)).logits.argmax(dim=-1)
    return float((best[:, 40:-1] == said[:, 1:]).float().mean())


def test_it_copies_what_was_said_before() -> None:
    model = build_model(SETTINGS, TOKENIZER, VOCAB_SIZE, seed=0)
    assert len(model.model.layers) == 6
    assert share_copied(model) > 0.1
    # the control: without either of the two heads there is nothing left of it
    for layer in model.model.layers[:2]:
        written = layer.self_attn.o_proj.weight
        kept = written.detach().clone()
        with torch.no_grad():
            written[:, :64] = 0
            assert share_copied(model) < 0.05
            written.copy_(kept)
    assert share_copied(model) > 0.1


def test_shapes_without_room_are_random() -> None:
    one_layer = SETTINGS.model_copy(update={"first_layers": 1})
    wide_head = SETTINGS.model_copy(update={"num_heads": 2})
    for settings in (one_layer, wide_head):
        model = build_model(settings, TOKENIZER, VOCAB_SIZE, seed=0)
        assert share_copied(model) < 0.05
