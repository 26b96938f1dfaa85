"""What tells a kind of draft heads from others."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from polybasic.chain.formats.checkpoints.decoder_config import HeadConfig, ModelSizes, Shape

Content = Mapping[str, Any]
"""Of a config.json."""
MAX_POSITIONS = 32
"""Tokens of a path that a head may give at once; DFlash's blocks have a bound of their own."""


def is_whole(value: object, allowed: range) -> TypeGuard[int]:
    """Whether a value of a config.json is one of these whole numbers; true and false are none."""
    return isinstance(value, int) and not isinstance(value, bool) and value in allowed


def model_config(
    sizes: ModelSizes, dtype: str, draft_vocab_size: int | None = None
) -> dict[str, Any]:
    """What the config.json of every head says of its verifier and its own weights.

    Args:
        sizes: of its verifier.
        dtype: of its weights.
        draft_vocab_size: tokens that it can draft; None for all.
    """
    drafted = {} if draft_vocab_size is None else {"draft_vocab_size": draft_vocab_size}
    return {
        "hidden_size": sizes.hidden_size,
        "rms_norm_eps": sizes.rms_norm_eps,
        "max_position_embeddings": sizes.context_tokens,
        "vocab_size": sizes.vocab_size,
        **drafted,
        "torch_dtype": dtype,
    }


@dataclass(frozen=True)
class HeadKind:
    """A kind of draft heads: what their files say and hold, and what runs them.

    Most heads hold layers of Llama's, mostly one, whose sizes their config.json gives in Llama's
    words, and a copy of their verifier's embedding. A head may draft a part of the vocabulary
    (draft_vocabulary.py).

    Attributes:
        name: as manifests name it.
        title: as people name it.
        tensors: shapes by name of what lies beside layer, embedding and draft vocabulary. A matrix
            that is stored with a bias is read with it.
        load: what loads it, as `polybasic.chain.model.loading.load_head` does; this and `drafter`
            as "package.module:attribute", which is imported when a head is loaded.
        drafter: what drafts with it, as `polybasic.deploy.runtime.drafters.head.EagleDrafter` does.
        layer: what the names of its layer's tensors begin with; of a kind with several layers, {}
            stands for their number. None of a head that has neither a layer of Llama's nor a copy
            of the embedding.
        norms: names of a layer's norms by their part, all of hidden_size; "mlp_norm" is one.
        further: the kind, by name, whose layers those after the first are like; None: its own.
        num_attended: states that lie side by side in what its attention reads.
        shares_cache: it runs layers of its verifier over its verifier's own cache, hence drafts for
            this one model and not for copies of it.
        steers: it biases the layers of another member, an independent model, and drafts by it; its
            `load` also takes this model.
        has_embedding: its file has a copy of its verifier's embedding.
        reads_own_embedding: it was trained with its embedding, which is then no copy.
        has_lm_head: `tensors` has the matrix that leads to tokens; else rows of its verifier's do.
        fields: fields of a `HeadConfig` that a layer of Llama's does not have. The second argument
            is the path of config.json, for errors.
        recognizes: whether a config.json is of this kind as others publish it. One that is not
            published by others names its kind (`KIND_KEY`).
    """

    name: str
    title: str
    tensors: Callable[[HeadConfig], Mapping[str, Shape]]
    load: str
    drafter: str
    layer: str | None = None
    norms: Mapping[str, str] = field(default_factory=dict)
    further: str | None = None
    num_attended: int = 1
    shares_cache: bool = False
    steers: bool = False
    has_embedding: bool = True
    reads_own_embedding: bool = False
    has_lm_head: bool = False
    fields: Callable[[Content, str], dict[str, Any]] = lambda content, where: {}
    recognizes: Callable[[Content], bool] = lambda content: False

    def layers(self, config: HeadConfig) -> list[str]:
        """What the names of the tensors of each layer begin with."""
        if self.layer is None:
            return []
        if "{}" not in self.layer:
            return [self.layer]
        return [self.layer.format(index) for index in range(config.num_layers)]

    def like(self, number: int) -> str:
        """The kind, by name, whose norms and inputs the layer of this number has."""
        return self.name if number == 0 else self.further or self.name
