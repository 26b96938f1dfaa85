"""What tells a kind of draft heads from others."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from polybasic.chain.formats.decoder_config import HeadConfig, Shape

Content = Mapping[str, Any]
"""Of a config.json."""


@dataclass(frozen=True)
class HeadKind:
    """A kind of draft heads: what their files say and hold, and what runs them.

    A head holds one layer of Llama's, whose sizes its config.json gives in Llama's words, and a
    copy of its verifier's embedding. It may draft a part of the vocabulary (draft_vocabulary.py).

    Attributes:
        name: as manifests name it.
        title: as people name it.
        layer: what the names of its layer's tensors begin with.
        norms: names of its layer's norms by their part, all of hidden_size; "mlp_norm" is one.
        tensors: shapes by name of what lies beside layer, embedding and draft vocabulary. A matrix
            that is stored with a bias is read with it.
        load: what loads it, as `polybasic.chain.model.loading.load_head` does; this and `drafter`
            as "package.module:attribute", which is imported when a head is loaded.
        drafter: what drafts with it, as `polybasic.deploy.drafters.head.EagleDrafter` does.
        num_attended: states that lie side by side in what its attention reads.
        has_lm_head: `tensors` has the matrix that leads to tokens; else rows of its verifier's do.
        fields: fields of a `HeadConfig` that a layer of Llama's does not have. The second argument
            is the path of config.json, for errors.
        recognizes: whether a config.json is of this kind as others publish it. One that is not
            published by others names its kind (`KIND_KEY`).
    """

    name: str
    title: str
    layer: str
    norms: Mapping[str, str]
    tensors: Callable[[HeadConfig], Mapping[str, Shape]]
    load: str
    drafter: str
    num_attended: int = 1
    has_lm_head: bool = False
    fields: Callable[[Content, str], dict[str, Any]] = lambda content, where: {}
    recognizes: Callable[[Content], bool] = lambda content: False
