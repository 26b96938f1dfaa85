"""What models are: shapes and constants of decoders and draft heads."""

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

Shape = tuple[int, ...]


@dataclass(frozen=True)
class LayerKind:
    """How the layers of one kind place tokens, and how far back they look.

    Attributes:
        rope: rotary parameters as transformers names them.
        window: tokens that a token sees, itself included; None for all.
    """

    rope: dict[str, Any]
    window: int | None = None


@dataclass(frozen=True)
class EncoderConfig:
    """What reads the source of an encoder-decoder, whose layers have the sizes of the decoder's.

    Attributes:
        num_layers: of the encoder.
        num_buckets: that relative distances are counted in.
        max_distance: from which on all distances are one.
        start_token_id: which the decoder reads first, after the source.
    """

    num_layers: int
    num_buckets: int
    max_distance: int
    start_token_id: int


@dataclass(frozen=True)
class DecoderConfig:
    """Shapes and constants of a decoder; the defaults are Llama's.

    Attributes:
        rope: rotary parameters as transformers names them (rope_type, rope_theta, factor, ...), of
            the layers that see all tokens.
        layer_kinds: one for each layer where windows or rotary parameters differ from `rope`
            alone; else empty.
        activation: of the gated MLP.
        attention_scale: factor of the scores; None for head_dim ** -0.5.
        attention_softcap: c of c * tanh(score / c); None leaves scores as they are.
        logit_softcap: as `attention_softcap`, of the logits.
        embedding_scale: factor of the embeddings that the first layer reads.
        biased: projections whose bias must be stored, by the last part of their names.
        has_fused_projections: q, k and v are stored as one matrix, gate and up as another.
        has_head_norms: queries and keys are normed head by head.
        has_post_norms: what attention and MLP add to the residual is normed.
        has_offset_norms: norms multiply by 1 + weight, in float32.
        encoder: of an encoder-decoder, whose layers have relative distances in place of rotations;
            None for a decoder alone.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    context_tokens: int
    tie_word_embeddings: bool
    rope: dict[str, Any]
    layer_kinds: tuple[LayerKind, ...] = ()
    activation: str = "silu"
    attention_scale: float | None = None
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    embedding_scale: float | None = None
    biased: tuple[str, ...] = ()
    has_fused_projections: bool = False
    has_head_norms: bool = False
    has_post_norms: bool = False
    has_offset_norms: bool = False
    encoder: EncoderConfig | None = None

    @property
    def query_groups(self) -> int:
        """Query heads that read one key/value head."""
        return self.num_heads // self.num_kv_heads

    @cached_property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The kinds of layers that there are, each once."""
        kinds: list[LayerKind] = []
        for kind in self.layer_kinds or (LayerKind(self.rope),):
            if kind not in kinds:
                kinds.append(kind)
        return tuple(kinds)

    def kind_of(self, layer: int) -> int:
        """Place of a layer's kind in `kinds`."""
        return self.kinds.index(self.layer_kinds[layer]) if self.layer_kinds else 0

    def of_first_layers(self, num_layers: int) -> "DecoderConfig":
        """Of the decoder's first layers alone."""
        return replace(self, num_layers=num_layers, layer_kinds=self.layer_kinds[:num_layers])

    @property
    def cache_shape(self) -> tuple[object, ...]:
        """Layers with their kinds, key/value heads, head size and width of the states.

        Decoders that agree in it can share a cache, and one's states serve a head of the other.
        """
        kinds = [self.kinds[self.kind_of(layer)] for layer in range(self.num_layers)]
        return kinds, self.num_kv_heads, self.head_dim, self.hidden_size


@dataclass(frozen=True)
class HeadConfig(DecoderConfig):
    """Shapes and constants of a draft head's layers, if it has any, and what it reads and drafts.

    Attributes:
        draft_vocab_size: tokens that it can draft; None where its config says nothing: all.
        feature_layers: the verifier's layers whose inputs it reads, in the order in which they lie
            side by side; empty for a head that reads its last states, as an EAGLE-2 head does.
        num_positions: tokens of a path that it drafts at most; None for a head that drafts level by
            level.
        markov_rank: of the bigrams that correct the logits of these positions; 0 for none.
        num_blocks: of each of several small heads, which have residual blocks in place of layers.
        exit_layer: how many of its verifier's first layers an early exit runs.
        adapter_rank: width of the adapter behind these layers, or of a steering's map; 0 for none.
        steered_layers: layers of the model that is steered.
        steered_size: its hidden size.
        feature_norms: norms of what an EAGLE-3 head's fc reads: one of each layer's part, or one
            of all of it; 0 for none.
        norms_residual: the residual of an EAGLE-3 head's layer is the normed feature.
        norms_output: an EAGLE-3 head continues what its final norm makes of its layer's output.
        mask_token_id: whose embedding rows for further positions read; None where they read that of
            the last token.
        own: what a kind has beside numbers that stand alone, as one record: a DFlash head's block.
        kind: of head, as manifests name it.
    """

    draft_vocab_size: int | None = None
    feature_layers: tuple[int, ...] = ()
    num_positions: int | None = None
    markov_rank: int = 0
    num_blocks: int = 0
    exit_layer: int = 0
    adapter_rank: int = 0
    steered_layers: int = 0
    steered_size: int = 0
    feature_norms: int = 0
    norms_residual: bool = False
    norms_output: bool = False
    mask_token_id: int | None = None
    own: object = None
    kind: str = field(kw_only=True)

    @property
    def num_draft_tokens(self) -> int:
        """Tokens that the head can draft."""
        return self.vocab_size if self.draft_vocab_size is None else self.draft_vocab_size


class LayerSizes(Protocol):
    """Sizes of a layer; a `DecoderConfig` has them."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...


class ModelSizes(Protocol):
    """What heads of a model have in common with it; a `DecoderConfig` has them."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def rms_norm_eps(self) -> float: ...
    @property
    def context_tokens(self) -> int: ...
