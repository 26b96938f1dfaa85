"""Block-parallel heads: one pass gives the logits of all positions of a draft.

An EAGLE-2 head of several layers (Li et al., 2024) reads, after the last token of the sequence, a
row for each position to fill, as P-EAGLE (arXiv 2602.01469) and DFlash heads do. Each of these rows
reads what that last token's row reads, plus a learned vector of its place. A low-rank table of
bigrams, a Markov chain along the drafted path, corrects the logits of a position by the token
before it.
"""

from typing import Any

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.checkpoints.decoder_config import HeadConfig, Shape
from polybasic.chain.formats.head_kinds.kind import MAX_POSITIONS, Content, HeadKind, is_whole

NUM_POSITIONS, MARKOV_RANK = "num_positions", "markov_rank"
"""Fields of its config.json: tokens that it drafts at most, rank of the bigrams (0: none)."""


def _fields(content: Content, where: str) -> dict[str, Any]:
    found = {}
    allowed = {NUM_POSITIONS: range(2, MAX_POSITIONS + 1), MARKOV_RANK: range(0, 4097, 16)}
    for name, values in allowed.items():
        value = content.get(name)
        if not is_whole(value, values):
            raise UserError(
                "malformed head config",
                f"{where} {name} {value!r}",
                f"give a multiple of {values.step} from {values[0]} to {values[-1]}",
            )
        found[name] = value
    return found


def _tensors(config: HeadConfig) -> dict[str, Shape]:
    H, rank = config.hidden_size, config.markov_rank
    assert config.num_positions is not None, "a block-parallel head says how far it drafts"
    tensors: dict[str, Shape] = {
        "fc.weight": (H, 2 * H),
        "place_features": (config.num_positions - 1, H),
    }
    if rank:
        tensors["markov_in"] = (config.vocab_size, rank)
        tensors["markov_out"] = (config.num_draft_tokens, rank)
    return tensors


BLOCK = HeadKind(
    name="block",
    title="block-parallel",
    layer="layers.{}",
    norms={"input_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"},
    tensors=_tensors,
    load="polybasic.chain.model.loading:load_head",
    drafter="polybasic.deploy.runtime.drafters.head:EagleDrafter",
    fields=_fields,
)
