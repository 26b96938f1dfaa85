"""Grows a whole chain, its target, 4-bit copies and draft heads, into a new folder."""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from growth.model import GrownWeights, Growth, Placing
from growth.shapes import GrownShape, check_family
from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.card import write_card
from polybasic.chain.formats.checkpoints.awq import QuantizedWeight
from polybasic.chain.formats.checkpoints.checkpoint import copy_files, model_files, weight_files
from polybasic.chain.formats.checkpoints.config import read_config
from polybasic.chain.formats.checkpoints.decoder_config import DecoderConfig
from polybasic.chain.formats.checkpoints.draft_vocabulary import draft_tables, draft_token_ids
from polybasic.chain.formats.checkpoints.kinds import is_head
from polybasic.chain.formats.checkpoints.names import DRAFT_TABLES
from polybasic.chain.formats.checkpoints.quantization import GROUP_SIZE
from polybasic.chain.formats.checkpoints.shapes import num_parameters, tensor_headers
from polybasic.chain.formats.files import sha256_of_file, whole_folder, write_json
from polybasic.chain.formats.head_kinds.table import KIND_KEY
from polybasic.chain.formats.lineage import QUANTIZED_FROM_KEY, TRAINED_FOR_KEY, verifier_of
from polybasic.chain.formats.manifest import Manifest, Member, Reference, write_manifest
from polybasic.chain.formats.origin import ORIGIN_KEY, recorded
from polybasic.chain.formats.package import refuse_replacing
from polybasic.chain.formats.verify import CheckedChain, check_chain, check_fit
from polybasic.chain.model.stored import StoredTensors

_CPU = torch.device("cpu")
_SHARD_BYTES = 2 << 30
_HEADS = ("eagle2", "block")
"""Kinds of draft heads that grow along with their target."""
_NORMS = ("input_layernorm", "post_attention_layernorm")
_AWQ_PARTS = ("qweight", "qzeros", "scales")
_ROPE_KEYS = ("rope_parameters", "rope_scaling", "rope_theta")

NamedTensors = Iterator[tuple[str, Tensor]]
GrowLinear = Callable[[StoredTensors, str, Placing, bool], NamedTensors]
"""Tensors, the small linear's name, placing, whether its layer is added -> the grown linear's
tensors. An added layer takes its name and sizes from an existing one."""


def grow_chain(
    source: Path,
    shape: GrownShape,
    shape_name: str,
    out: Path,
    *,
    device: torch.device = _CPU,
    target: str | None = None,
) -> Manifest:
    """Write `source` grown to `shape` as the chain `out`, whole, with all members inside.

    Measured plans and results of the source do not apply to the grown chain and are left out.

    Args:
        source: a chain of a Llama target, 4-bit copies of it and heads for it.
        shape: to grow to.
        shape_name: labels the chain as grown.
        out: the folder to write; an older chain there is replaced.
        device: computes the grown weights.
        target: the folder or hub id that the target of `source` is taken from; None for what the
            chain says.

    Raises:
        UserError: not a chain, other kinds of members, a shape that the target does not fit into,
            something else at `out`, or a full disk.
    """
    chain = check_chain(source, target=target)
    refuse_replacing(out, {"chain": source, **chain.members})
    growths = _growths(chain, shape, device)
    with whole_folder(out) as partial:
        first, *others = chain.manifest.members
        members = [_grow_member(chain, first, growths[first.name], partial, {})]
        digest = verifier_of(members[0], read_config(partial / first.name)).sha256
        for member in others:
            key = TRAINED_FOR_KEY if is_head(member.kind) else QUANTIZED_FROM_KEY
            growth, origin = growths[member.name], {key: digest}
            if recorded(chain.configs[member.name].content, KIND_KEY):
                origin[KIND_KEY] = member.kind
            members.append(_grow_member(chain, member, growth, partial, origin))
        tokenizer = chain.manifest.tokenizer
        copy_files(chain.tokenizer, partial / tokenizer.path, list(tokenizer.files))
        folders = {member.name: partial / member.name for member in members}
        check_fit(members, folders, partial / tokenizer.path)
        manifest = chain.manifest.model_copy(
            update={"members": tuple(members), "plans": (), "results": None, "grown": shape_name}
        )
        write_manifest(partial, manifest)
        write_card(partial, manifest)
    return manifest


def _growths(chain: CheckedChain, shape: GrownShape, device: torch.device) -> dict[str, Growth]:
    """The growth of each member; everything is checked before anything is written."""
    small = chain.target_config.decoder
    _check_members(chain, small)
    growth = Growth(small, shape, device)
    growths = {}
    for member in chain.manifest.members:
        growths[member.name] = growth
        if member.kind == "awq":
            GrownWeights(growth, chain.configs[member.name].group_size).check_groups()
        elif member.kind in _HEADS:
            head = chain.configs[member.name].head
            growths[member.name] = Growth(head, _head_shape(growth, head), device)
    return growths


def _check_members(chain: CheckedChain, small: DecoderConfig) -> None:
    """Refuse members that do not grow along with the target."""
    if chain.manifest.grown is not None:
        raise UserError(
            "chain is grown already",
            f"{chain.folder} ({chain.manifest.grown})",
            "grow the chain that it was grown from",
        )
    target = chain.manifest.members[0]
    check_family(chain.target_config.content, small, str(chain.target_config.path))
    digest = verifier_of(target, chain.target_config).sha256
    for member in chain.manifest.members[1:]:
        folder = chain.members[member.name]
        if is_head(member.kind) and member.kind not in _HEADS:
            raise UserError(
                "member cannot be grown",
                f"{member.name} of {chain.folder} is of kind {member.kind}",
                f"package a chain with a head of kind {' or '.join(_HEADS)} in its place",
            )
        if member.kind in _HEADS and target.name in member.drafts_for:
            _check_head(member, folder)
        elif (
            member.kind != "awq"
            or verifier_of(member, chain.configs[member.name]).made_from != digest
        ):
            raise UserError(
                "member cannot be grown",
                f"{member.name} of {chain.folder} is no 4-bit copy of {target.name} and no head "
                "for it",
                "package a chain without it",
            )


def _check_head(member: Member, folder: Path) -> None:
    biases = [name for name in tensor_headers(folder) if name.endswith(".bias")]
    if biased := sorted(set(biases) - {"fc.bias"}):
        raise UserError(
            "member cannot be grown",
            f"{member.name} in {folder} has {biased[0]}",
            "package a chain with a head whose layer has no biases",
        )


def _grow_member(
    chain: CheckedChain,
    member: Member,
    growth: Growth,
    out: Path,
    origin: dict[str, str],
) -> Member:
    source, folder = chain.members[member.name], out / member.name
    folder.mkdir()
    weights = StoredTensors(source, torch.float32, torch.device("cpu"))
    grown = GrownWeights(growth, chain.configs[member.name].group_size)
    match member.kind:
        case "eagle2" | "block":
            tensors = _head_tensors(weights, grown)
        case "awq":
            tensors = _decoder_tensors(weights, grown, _int4_linear)
        case kind:
            assert kind == "decoder", "other heads are refused before"
            tensors = _decoder_tensors(weights, grown, _dense_linear)
    digests = _write_shards(folder, tensors)
    write_json(
        folder / "config.json", _grown_config(chain.configs[member.name].content, growth, origin)
    )
    if (source / "generation_config.json").is_file():
        copy_files(source, folder, ["generation_config.json"])
    others = set(model_files(folder)) - digests.keys()
    digests |= {name: sha256_of_file(folder / name) for name in others}
    return member.model_copy(
        update={
            "reference": Reference(path=member.name),
            "num_parameters": num_parameters(tensor_headers(folder)),
            "num_bytes": sum(path.stat().st_size for path in weight_files(folder)),
            "files": dict(sorted(digests.items())),
            "gguf": None,
        }
    )


def _head_shape(growth: Growth, head: DecoderConfig) -> GrownShape:
    """The grown target's shape, with the head's layers and an MLP in proportion to the target's."""
    shape, small = growth.shape, growth.small
    wanted = shape.intermediate_size * head.intermediate_size / small.intermediate_size
    size = -(-int(wanted) // GROUP_SIZE) * GROUP_SIZE
    if head.intermediate_size == small.intermediate_size:
        size = shape.intermediate_size
    return replace(
        shape, num_layers=head.num_layers, intermediate_size=size, vocab_size=growth.vocab_size
    )


def _grown_config(
    config: Mapping[str, Any], growth: Growth, origin: dict[str, str]
) -> dict[str, Any]:
    shape = growth.shape
    grown = {
        **config,
        "vocab_size": growth.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "rms_norm_eps": growth.norm_eps,
        "tie_word_embeddings": False,
        ORIGIN_KEY: origin,
    }
    if growth.rope != growth.small.rope:
        grown = {key: value for key, value in grown.items() if key not in _ROPE_KEYS}
        grown["rope_parameters"] = growth.rope
    return grown


def _decoder_tensors(
    weights: StoredTensors, grown: GrownWeights, grow_linear: GrowLinear
) -> NamedTensors:
    growth = grown.growth
    yield "model.embed_tokens.weight", grown.embedding(weights.stored("model.embed_tokens.weight"))
    for layer in range(growth.shape.num_layers):
        prefix = f"model.layers.{layer}."
        is_added = layer >= growth.small.num_layers
        for norm in _NORMS:
            weight = None if is_added else weights.stored(f"{prefix}{norm}.weight")
            yield f"{prefix}{norm}.weight", grown.norm(weight)
        for name, placing in grown.linears.items():
            like = f"model.layers.0.{name}" if is_added else f"{prefix}{name}"
            for part, tensor in grow_linear(weights, like, placing, is_added):
                yield f"{prefix}{name}.{part}", tensor
    yield "model.norm.weight", grown.norm(weights.stored("model.norm.weight"), is_final=True)
    read = "model.embed_tokens" if growth.small.tie_word_embeddings else "lm_head"
    yield "lm_head.weight", grown.lm_head(weights.stored(f"{read}.weight"))


def _dense_linear(
    weights: StoredTensors, name: str, placing: Placing, is_added: bool
) -> NamedTensors:
    weight = weights.stored(f"{name}.weight")
    yield "weight", placing.dense(None if is_added else weight, weight.dtype)


def _int4_linear(
    weights: StoredTensors, name: str, placing: Placing, is_added: bool
) -> NamedTensors:
    weight = None
    if not is_added:
        device = placing.rows.device
        stored = (weights.stored(f"{name}.{part}").to(device) for part in _AWQ_PARTS)
        weight = QuantizedWeight.unpack(*stored, name=name)
    yield from zip(_AWQ_PARTS, placing.int4(weight, name), strict=True)


def _head_tensors(weights: StoredTensors, grown: GrownWeights) -> NamedTensors:
    embedding, fc = weights.stored("embed_tokens.weight"), weights.stored("fc.weight")
    yield "embed_tokens.weight", grown.embedding(embedding)
    yield "fc.weight", grown.fc(fc, embedding)
    if "fc.bias" in weights:
        yield "fc.bias", grown.fc_bias(weights.stored("fc.bias"))
    for layer in range(grown.growth.shape.num_layers):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            if (name := f"layers.{layer}.{norm}.weight") in weights:
                yield name, grown.norm(weights.stored(name))
        for name, placing in grown.linears.items():
            name = f"layers.{layer}.{name}"
            for part, tensor in _dense_linear(weights, name, placing, False):
                yield f"{name}.{part}", tensor
    tables = {name: weights.stored(name) for name in DRAFT_TABLES if name in weights}
    if (token_ids := draft_token_ids(tables)) is not None:
        # tokens of the small vocabulary keep their ids
        yield from draft_tables(token_ids, grown.growth.vocab_size).items()
    if "place_features" in weights:
        yield "place_features", grown.states(weights.stored("place_features"))
    if "markov_in" in weights:
        yield "markov_in", grown.by_token(weights.stored("markov_in"))
        drafted = weights.stored("markov_out")
        yield "markov_out", drafted.clone() if tables else grown.by_token(drafted)


@dataclass
class _Shards:
    """Weight files of one folder, written one by one while digests are computed in parallel."""

    folder: Path
    pool: ThreadPoolExecutor
    weight_map: dict[str, str] = field(default_factory=dict)
    digests: dict[str, Future[str]] = field(default_factory=dict)

    def write(self, tensors: dict[str, Tensor]) -> None:
        name = f"model-{len(self.digests) + 1:05d}.safetensors"
        save_file(tensors, self.folder / name, {"format": "pt"})
        self.weight_map |= dict.fromkeys(tensors, name)
        self.digests[name] = self.pool.submit(sha256_of_file, self.folder / name)


def _write_shards(folder: Path, tensors: NamedTensors) -> dict[str, str]:
    """Write tensors as they arrive, to one file or several with an index; digests of the files."""
    shard: dict[str, Tensor] = {}
    num_bytes, total_bytes = 0, 0
    with ThreadPoolExecutor() as pool:
        shards = _Shards(folder, pool)
        for name, tensor in tensors:
            if shard and num_bytes + tensor.nbytes > _SHARD_BYTES:
                shards.write(shard)
                shard, num_bytes = {}, 0
            shard[name] = tensor.contiguous()
            num_bytes += tensor.nbytes
            total_bytes += tensor.nbytes
        shards.write(shard)
        digests = {name: digest.result() for name, digest in shards.digests.items()}
    if len(digests) == 1:
        ((name, digest),) = digests.items()
        (folder / name).rename(folder / "model.safetensors")
        return {"model.safetensors": digest}
    index = {"metadata": {"total_size": total_bytes}, "weight_map": shards.weight_map}
    write_json(folder / "model.safetensors.index.json", index)
    return digests
