"""DFlash heads, and those of Domino and DSpark, which correct DFlash's logits.

A head of this kind gives the tokens of a whole block in one pass. Its layers are Qwen3's. The rows
of the block are its anchor, the last token of the sequence, and mask tokens after it; all of them
see each other. Before them, keys and values of every layer are made of what the verifier's layers
say of each token so far (DFlash, arXiv 2602.06036).

Config.json and tensors are spelled as in z-lab's own checkpoints, those of Domino and DSpark as in
SpecForge's (specforge 0.2.0, specforge/modeling/draft: dflash.py, domino.py and dspark.py).
"""

from dataclasses import dataclass
from typing import Any, Literal, get_args

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.checkpoints.decoder_config import HeadConfig, Shape
from polybasic.chain.formats.head_kinds.kind import Content, HeadKind, is_whole

SECTION, BLOCK_SIZE, MASK_TOKEN, LAYER_IDS, SHIFT, CAUSAL, PROJECTOR = (
    "dflash_config",
    "block_size",
    "mask_token_id",
    "target_layer_ids",
    "shift_label",
    "causal",
    "projector_type",
)
"""In a config.json: the section, and all that is in it but for the size of a block."""
MAX_BLOCK_SIZE = 64
_MAX = 1 << 24
MarkovKind = Literal["vanilla", "gated", "rnn"]


@dataclass(frozen=True)
class Domino:
    """A correction by a GRU over the tokens before, and a small network over its state.

    Attributes:
        width: of the network between its two matrices.
        state_size: of the GRU.
        num_plain: positions of the block, the first ones, that are not corrected.
    """

    width: int
    state_size: int
    num_plain: int


@dataclass(frozen=True)
class Markov:
    """A correction by the token before: a table of bigrams of low rank.

    Attributes:
        rank: of the table.
        kind: "vanilla" is the table; "gated" scales it by what the row says; "rnn" carries a state
            along the block.
        confidence_inputs: of the head that predicts whether a token will be accepted; 0 for none.
            It is kept in the file, and nothing here reads it.
    """

    rank: int
    kind: MarkovKind
    confidence_inputs: int


@dataclass(frozen=True)
class DFlashBlock:
    """What a head drafts in one pass.

    Attributes:
        size: rows, the anchor's included.
        mask_token_id: whose embedding the other rows read.
        predicts_next: a row gives the token after its own position; else that of its position, and
            the anchor's row gives none.
        is_causal: rows see none of the block after them; None: in layers with a window alone.
        correction: of the logits of a row by drafted tokens before it; None for none.
    """

    size: int
    mask_token_id: int
    predicts_next: bool
    is_causal: bool | None
    correction: Domino | Markov | None

    @property
    def num_levels(self) -> int:
        """Tokens of a path."""
        return self.size if self.predicts_next else self.size - 1


def block_of(config: HeadConfig) -> DFlashBlock:
    """The block of a head of this kind."""
    assert isinstance(config.own, DFlashBlock), f"kind {config.kind}"
    return config.own


def _fields(content: Content, where: str) -> dict[str, Any]:
    given = content.get(SECTION)
    if not isinstance(given, dict):
        raise _malformed(where, SECTION, given, "an object")
    read = _Section(given | {BLOCK_SIZE: content.get(BLOCK_SIZE, given.get(BLOCK_SIZE))}, where)
    layers = given.get(LAYER_IDS)
    known = range(-1, _MAX)
    if (
        not isinstance(layers, list)
        or not layers
        or not all(is_whole(layer, known) for layer in layers)
    ):
        raise _malformed(where, f"{SECTION}.{LAYER_IDS}", layers, "a list of layers")
    size = read.whole(BLOCK_SIZE, 2, MAX_BLOCK_SIZE)
    block = DFlashBlock(
        size,
        read.whole(MASK_TOKEN, 0, _size(content, "vocab_size") - 1),
        bool(given.get(SHIFT)),
        None if given.get(CAUSAL) is None else bool(given[CAUSAL]),
        _correction(read, _size(content, "hidden_size"), where),
    )
    return {
        # a layer's output, which they name, is the input of the next one
        "feature_layers": tuple(layer + 1 for layer in layers),
        "has_head_norms": True,
        "num_positions": block.num_levels,
        "own": block,
    }


def _correction(read: "_Section", hidden_size: int, where: str) -> Domino | Markov | None:
    match read.content.get(PROJECTOR):
        case None | "dflash":
            return None
        case "domino":
            return Domino(
                read.whole("emb_dim", 1),
                read.whole("gru_hidden_dim", 1),
                read.whole("pure_draft_prefix_len", 0, MAX_BLOCK_SIZE, default=0),
            )
        case "dspark":
            kind = read.content.get("markov_head_type", "vanilla")
            if kind not in get_args(MarkovKind):
                known = ", ".join(get_args(MarkovKind))
                raise _malformed(where, f"{SECTION}.markov_head_type", kind, f"one of {known}")
            rank, inputs = read.whole("markov_rank", 1), 0
            if read.content.get("enable_confidence_head"):
                reads_token = bool(read.content.get("confidence_head_with_markov"))
                inputs = hidden_size + reads_token * rank
            return Markov(rank, kind, inputs)
        case other:
            raise _malformed(
                where, f"{SECTION}.{PROJECTOR}", other, "one of dflash, domino, dspark"
            )


@dataclass(frozen=True)
class _Section:
    """The section of a config.json, at `where`."""

    content: Content
    where: str

    def whole(self, key: str, least: int, most: int = _MAX, default: Any = None) -> int:
        """A whole number of the section."""
        value = self.content.get(key, default)
        if not is_whole(value, range(least, most + 1)):
            key = key if key == BLOCK_SIZE else f"{SECTION}.{key}"
            raise _malformed(self.where, key, value, f"{least} to {most}")
        return value


def _size(content: Content, key: str) -> int:
    """One of the config's own, which is checked after these fields; any number if it is none."""
    value = content.get(key)
    return value if isinstance(value, int) else _MAX


def _malformed(where: str, key: str, value: Any, wanted: str) -> UserError:
    return UserError(
        "malformed head config", f"{where} {key} {value!r}, wanted {wanted}", "download it again"
    )


def _tensors(config: HeadConfig) -> dict[str, Shape]:
    H, V, D = config.hidden_size, config.vocab_size, config.num_draft_tokens
    shapes: dict[str, Shape] = {
        "fc.weight": (H, len(config.feature_layers) * H),
        "hidden_norm.weight": (H,),
        "norm.weight": (H,),
    }
    match block_of(config).correction:
        case Domino(width, state_size, _):
            shapes["prefix_gru.weight_ih_l0"] = (3 * state_size, H)
            shapes["prefix_gru.weight_hh_l0"] = (3 * state_size, state_size)
            shapes["embed_proj.0.weight"] = (width, H + state_size)
            shapes["embed_proj.2.weight"] = (D, width)
        case Markov(rank, kind, confidence_inputs):
            shapes["markov_head.markov_w1.weight"] = (V, rank)
            shapes["markov_head.markov_w2.weight"] = (D, rank)
            if kind == "gated":
                shapes["markov_head.gate_proj.weight"] = (rank, H + rank)
                shapes["markov_head.gate_proj.bias"] = (rank,)
            if kind == "rnn":
                shapes["markov_head.joint_proj.weight"] = (3 * rank, H + 2 * rank)
                shapes["markov_head.joint_proj.bias"] = (3 * rank,)
            if confidence_inputs:
                shapes["confidence_head.proj.weight"] = (1, confidence_inputs)
                shapes["confidence_head.proj.bias"] = (1,)
    return shapes


DFLASH = HeadKind(
    name="dflash",
    title="DFlash",
    layer="layers.{}",
    norms={"input_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"},
    tensors=_tensors,
    load="polybasic.chain.model.dflash:load_dflash",
    drafter="polybasic.deploy.runtime.drafters.head:EagleDrafter",
    has_embedding=False,
    fields=_fields,
    recognizes=lambda content: SECTION in content,
)
