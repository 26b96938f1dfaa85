"""Bytes of weights as they lie when loaded, from the headers of their files. No torch in here.

#   O = out features, I = in features
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

from polybasic.chain.formats.config import DecoderConfig, HeadConfig
from polybasic.chain.formats.manifest import HEAD_KINDS, Kind
from polybasic.chain.formats.names import DRAFT_TABLES, HEAD_LAYER, layer_linears, layer_norms
from polybasic.chain.formats.shapes import TensorHeader

Kernels = Literal["eager", "native", "device"]
"""What multiplies: PyTorch's operations, or kernels that read 4-bit weights of all kinds, those of
`polybasic.chain.kernels.cpu` or of `polybasic.chain.kernels.cuda`."""

_ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
_GROUP_SIZE = 128
_DRAFT_GROUP_SIZE = 64
"""Of a head's weights that are rounded to 4 bits (chain/model/linear.py)."""
_OUTPUTS_SIDE_BY_SIDE = {"eager": 64, "native": 16, "device": 1}
"""Numbers of outputs are filled up to a multiple of it where weights are laid out anew."""
_GROUP_BYTES = {"eager": 4, "native": 5, "device": 4}
"""Scale and zero of a group: two bfloat16; a float32 and a byte; or in one word."""
_ROUNDED_DTYPES = {"eager": (), "native": ("bfloat16",), "device": ("bfloat16", "float16")}
"""In which a head's weights are rounded to 4 bits."""
_TOKEN_ID_BYTES = 8
_UNPACKING_BYTES = 8.5
"""A weight of 4 bits while its words are taken apart: two int32, and the word's own 4 bits."""
_PACKING_BYTES = {"eager": 4, "native": 1.5}
"""A weight of 4 bits beside its code while it is packed: an int32; three times half a byte."""
_PACKED_AT_ONCE, _PACKING_BYTES_AT_ONCE = 1 << 24, 9
"""A weight of 4 bits while it is packed for the device path, some at a time: a byte and two int32
(chain/kernels/torch/packed_weight.py)."""
_WEIGHTS_AT_ONCE = 1 << 22
_DEQUANTIZING_BYTES = 12
"""A weight of 4 bits in three float32, some at a time (chain/model/linear.py)."""
_ROUNDING_BYTES = 14
"""A weight of a head while it is rounded to 4 bits, some at a time (chain/model/linear.py)."""


@dataclass(frozen=True)
class Layout:
    """How weights lie on a device.

    Attributes:
        device: "cpu" or "cuda".
        dtype: of dense weights and caches.
        kernels: that multiply.
        copies_dense: dense weights are laid out anew, so that a tied lm_head is a second copy.
    """

    device: str
    dtype: str
    kernels: Kernels
    copies_dense: bool

    @property
    def item_bytes(self) -> int:
        """Of one value in `dtype`."""
        return _ITEM_BYTES[self.dtype]

    def dense_bytes(self, out_size: int, in_size: int) -> int:
        """Of a dense product's weight [O, I]."""
        return self._padded(out_size) * in_size * self.item_bytes

    def int4_bytes(self, out_size: int, in_size: int) -> dict[str, int]:
        """Of a 4-bit product's weight [O, I], by kind: "int4" and what lies in "linears"."""
        if self.device != "cpu" and self.kernels == "eager":
            return {"linears": self.dense_bytes(out_size, in_size)}
        codes = in_size // 2 + in_size // _GROUP_SIZE * _GROUP_BYTES[self.kernels]
        if self.kernels != "eager":
            return {"int4": self._padded(out_size) * codes}
        # passes over many rows read a dequantized copy in bfloat16, whatever the dtype
        multiple = _OUTPUTS_SIDE_BY_SIDE["eager"]
        return {"int4": out_size * codes, "linears": 2 * _filled(out_size, multiple) * in_size}

    def drafts_in_4_bits(self, in_size: int) -> bool:
        """As `polybasic.chain.model.linear.drafts_in_4_bits`."""
        return self.dtype in _ROUNDED_DTYPES[self.kernels] and in_size % _DRAFT_GROUP_SIZE == 0

    def draft_bytes(self, out_size: int, in_size: int) -> int:
        """Of a head's weight [O, I] that is rounded to 4 bits."""
        groups = in_size // _DRAFT_GROUP_SIZE
        return self._padded(out_size) * (in_size // 2 + groups * _GROUP_BYTES[self.kernels])

    def packing_bytes(self, num_weights: int) -> int:
        """Of so many weights of 4 bits while they are packed, beside their codes of a byte."""
        if self.kernels == "device":
            return _PACKING_BYTES_AT_ONCE * min(num_weights, _PACKED_AT_ONCE)
        return round(_PACKING_BYTES[self.kernels] * num_weights)

    def _padded(self, out_size: int) -> int:
        if not self.copies_dense:
            return out_size
        return _filled(out_size, _OUTPUTS_SIDE_BY_SIDE[self.kernels])


@dataclass(frozen=True)
class Part:
    """Something of a member that is loaded at a time.

    Attributes:
        kind: "embedding", "lm_head", "linears", "int4", "norms" or "draft_tokens"; biases count
            with what they belong to.
        num_bytes: that stay.
        loading_bytes: that are taken while it is made, those that stay included.
        num_packed: weights of a 4-bit product.
    """

    kind: str
    num_bytes: int
    loading_bytes: int
    num_packed: int = 0


@dataclass(frozen=True)
class WeightFiles:
    """The weights of one member.

    Attributes:
        kind: of the member.
        config: a head's is a `HeadConfig`.
        headers: of all of its tensors, by name.
        layout: that they are loaded into.
    """

    kind: Kind
    config: DecoderConfig
    headers: dict[str, TensorHeader]
    layout: Layout

    def parts(self) -> Iterator[Part]:
        """All that is made of them, in the order of `polybasic.chain.model.loading`."""
        if self.kind in HEAD_KINDS:
            yield from self._head()
            return
        config = self.config
        yield self._tensor("embedding", "model.embed_tokens.weight")
        if not config.tie_word_embeddings:
            yield from self._linear(["lm_head"], "lm_head")
        elif self.layout.copies_dense:
            yield self._dense("lm_head", config.vocab_size, config.hidden_size)
        for index in range(config.num_layers):
            yield from self._layer(f"model.layers.{index}", "decoder")
        yield self._norm("model.norm")

    def _head(self) -> Iterator[Part]:
        """A head's own; it reads the embedding of its verifier, and may read its lm_head."""
        assert isinstance(self.config, HeadConfig)
        kind, num_tokens = self.config.kind, self.config.num_draft_tokens
        width = self.config.hidden_size
        yield from self._layer(HEAD_LAYER[kind], kind)
        yield from self._linear(["fc"])
        is_trimmed = not self.headers.keys().isdisjoint(DRAFT_TABLES)
        if is_trimmed:
            num_bytes = _TOKEN_ID_BYTES * num_tokens
            yield Part("draft_tokens", num_bytes, num_bytes)
        if kind == "eagle3":
            yield from self._linear(["lm_head"], "lm_head")
            yield self._norm("norm")
        elif is_trimmed or self.layout.drafts_in_4_bits(width):
            yield self._dense("lm_head", num_tokens, width)

    def _layer(self, prefix: str, kind: Kind) -> Iterator[Part]:
        config = self.config
        heads = {"query_norm": config.num_heads, "key_norm": config.num_kv_heads}
        for part, (name, _) in layer_norms(config, kind).items():
            yield self._norm(f"{prefix}.{name}", heads.get(part))
        for names in layer_linears(config, kind).values():
            yield from self._linear([f"{prefix}.{name}" for name in names])

    def _norm(self, name: str, num_heads: int | None = None) -> Part:
        """A norm's weight; where `num_heads` are normed by it, also one for each of them."""
        layout = self.layout
        item_bytes = 4 if self.config.has_offset_norms else layout.item_bytes
        copies = 1 if num_heads is None else 1 + num_heads
        # native kernels read norms in float32
        read_bytes = 4 if layout.kernels == "native" and item_bytes != 4 else 0
        return self._tensor("norms", f"{name}.weight", copies * item_bytes + read_bytes)

    def _linear(self, names: Sequence[str], kind: str = "linears") -> Iterator[Part]:
        """The product of several linears side by side."""
        bias_bytes = 4 if self.layout.kernels == "native" else self.layout.item_bytes
        for name in names:
            if f"{name}.bias" in self.headers:
                yield self._tensor(kind, f"{name}.bias", bias_bytes)
        if f"{names[0]}.qweight" in self.headers:
            yield from self._int4([self.headers[f"{name}.qweight"] for name in names])
            return
        stored = [self.headers[f"{name}.weight"] for name in names]
        yield self._dense(kind, sum(one.shape[0] for one in stored), stored[0].shape[1], stored)

    def _tensor(self, kind: str, name: str, item_bytes: int | None = None) -> Part:
        header = self.headers[name]
        num_bytes = prod(header.shape) * (item_bytes or self.layout.item_bytes)
        return Part(kind, num_bytes, num_bytes + self._mapped([header]))

    def _dense(
        self, kind: str, out_size: int, in_size: int, stored: Sequence[TensorHeader] = ()
    ) -> Part:
        if self.kind in HEAD_KINDS and self.layout.drafts_in_4_bits(in_size):
            return self._rounded(kind, out_size, in_size)
        num_bytes, beside = self.layout.dense_bytes(out_size, in_size), self._mapped(stored)
        if self.layout.copies_dense:
            # what it is made of: the stored tensor, then a copy of it in the dtype
            beside = max(beside, out_size * in_size * self.layout.item_bytes)
        return Part(kind, num_bytes, num_bytes + beside)

    def _rounded(self, kind: str, out_size: int, in_size: int) -> Part:
        """A product that was rounded to 4 bits."""
        layout, num = self.layout, out_size * in_size
        num_bytes = layout.draft_bytes(out_size, in_size)
        # codes in parts and all of them side by side, then packed; the weight itself stays beside
        rounding = 2 * num + _ROUNDING_BYTES * min(num, _WEIGHTS_AT_ONCE)
        packing = num + layout.packing_bytes(num) + num_bytes
        return Part(kind, num_bytes, layout.item_bytes * num + max(rounding, packing), num)

    def _int4(self, words: Sequence[TensorHeader]) -> Iterator[Part]:
        """A 4-bit product, by its words [I, O / 8]."""
        in_size, num_weights = words[0].shape[0], [8 * prod(one.shape) for one in words]
        num_all = sum(num_weights)
        kept = self.layout.int4_bytes(num_all // in_size, in_size)
        staying = sum(kept.values())
        packing = self.layout.packing_bytes(num_all) if "int4" in kept else 0
        dequantizing = _DEQUANTIZING_BYTES * min(num_all, _WEIGHTS_AT_ONCE)
        making = max(packing, dequantizing if "linears" in kept else 0)
        loading_bytes = staying + making
        if self.layout.device == "cpu":
            unpacking = num_all - num_weights[-1] + _UNPACKING_BYTES * num_weights[-1]
            loading_bytes = round(max(unpacking, staying + num_all + making))
        for kind, num_bytes in kept.items():
            yield Part(kind, num_bytes, loading_bytes, num_all if kind == "int4" else 0)
            loading_bytes -= num_bytes

    def _mapped(self, stored: Sequence[TensorHeader]) -> int:
        """Of the file, whose pages are resident while they are read."""
        return sum(one.num_bytes for one in stored) if self.layout.device == "cpu" else 0


def _filled(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
