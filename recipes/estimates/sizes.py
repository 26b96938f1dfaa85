"""Parameters and bytes of the models of a recipe, from shapes alone."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.checkpoints.checkpoint import SMALL_HEADS, split_hub_id
from polybasic.chain.formats.checkpoints.config import read_config
from polybasic.chain.formats.checkpoints.decoder_config import DecoderConfig
from polybasic.chain.formats.checkpoints.hub import snapshot
from polybasic.chain.formats.checkpoints.models import resolve_model
from polybasic.chain.formats.checkpoints.names import linear_shapes, source_linears
from polybasic.chain.formats.checkpoints.quantization import GROUP_SIZE, largest_group_size
from polybasic.chain.formats.checkpoints.shapes import encoder_shapes
from polybasic.chain.formats.gguf.finding import names_gguf, on_hub
from polybasic.quantize.settings import GroupSize
from polybasic.recipes.schema.recipe import Recipe
from polybasic.train.settings import HeadSettings

_WEIGHT_NAMES = SMALL_HEADS + tuple(
    f"{stem}.{suffix}{index}"
    for stem, suffix in (
        ("model", "safetensors"),
        ("pytorch_model", "bin"),
        ("adapter_model", "safetensors"),
        ("adapter_model", "bin"),
    )
    for index in ("", ".index.json")
)
_SCALE_BYTES = 2.5
"""Of a 4-bit group's float16 scale and zero point."""
_BLOCK_BYTES = 18 / 32
"""Of a weight in Q4_0."""
_TOP_BYTES = 64 * (4 + 2)
"""Of the most probable tokens that offline features keep of a token."""
_COVERING_TOKENS = 12_288
"""About as many as cover 98 % of what English answers hold."""


@dataclass(frozen=True)
class DecoderSizes:
    """Sizes of a decoder.

    Attributes:
        num_layer_vectors: parameters of a layer's biases and norms beyond Llama's two norms, and of
            what reads an encoder's source.
        num_encoder_parameters: of an encoder, and of the distances of both.
        group_size: of its 4-bit copy.
        in_blocks: whether that copy has all matrices in blocks of Q4_0, embeddings too.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    is_tied: bool
    weight_bytes: int = 2
    num_layer_vectors: int = 0
    num_encoder_parameters: int = 0
    group_size: int = GROUP_SIZE
    in_blocks: bool = False

    @property
    def num_embedding_parameters(self) -> int:
        """Of the embedding alone; lm_head has as many."""
        return self.vocab_size * self.hidden_size

    @property
    def num_layer_parameters(self) -> int:
        """Of one decoder layer, norms and biases included."""
        return self._num_llama_layer_parameters + self.num_layer_vectors

    @property
    def _num_llama_layer_parameters(self) -> int:
        attention = 2 * self.hidden_size * self.head_size * (self.num_heads + self.num_kv_heads)
        return attention + 3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size

    @property
    def num_parameters(self) -> int:
        """Of the whole model; a tied lm_head is not counted twice."""
        embeddings = self.num_embedding_parameters * (1 if self.is_tied else 2)
        layers = self.num_layers * self.num_layer_parameters + self.num_encoder_parameters
        return embeddings + layers + self.hidden_size

    @property
    def num_draft_parameters(self) -> int:
        """Trained parameters of an EAGLE-2 head; its file also holds the target's embedding."""
        return 2 * self.hidden_size**2 + self._num_llama_layer_parameters

    @property
    def num_bytes(self) -> int:
        """Of the checkpoint's weights."""
        return self.num_parameters * self.weight_bytes

    @property
    def num_int4_bytes(self) -> int:
        """Of the 4-bit checkpoint: layers packed, embeddings as they are but in blocks."""
        layers = self.num_layers * self.num_layer_parameters
        embeddings = self.num_parameters - layers
        return int(embeddings * self._copied_embedding_bytes + layers * self._int4_bytes)

    @property
    def _copied_embedding_bytes(self) -> float:
        return self._int4_bytes if self.in_blocks else 2

    @property
    def _int4_bytes(self) -> float:
        """Of a weight in 4 bits, with its share of the group's scale and zero point, if any."""
        return _BLOCK_BYTES if self.in_blocks else 0.5 + _SCALE_BYTES / self.group_size

    def divided_bytes(self, is_int4: bool = False) -> float:
        """Of what tensor parallelism divides: the layers' matrices, and an lm_head of its own."""
        matrices = self.num_layers * (self._num_llama_layer_parameters - 2 * self.hidden_size)
        lm_head = 0 if self.is_tied else self.num_embedding_parameters
        return matrices * (self._int4_bytes if is_int4 else self.weight_bytes) + lm_head * (
            self._copied_embedding_bytes if is_int4 else self.weight_bytes
        )

    @property
    def num_draft_bytes(self) -> int:
        """Of the exported head in bfloat16 with its copy of the embedding."""
        return 2 * (self.num_draft_parameters + self.num_embedding_parameters)

    @property
    def num_layer_inputs_parameters(self) -> int:
        """What an EAGLE-3 head has more than an EAGLE-2 head: a third layer's input to fuse,
        attention that reads two states, three norms more, and less a norm that both count."""
        queries = self.head_size * (self.num_heads + 2 * self.num_kv_heads)
        return self.hidden_size * (self.hidden_size + queries + 2)


@dataclass(frozen=True)
class HeadCount:
    """Sizes of a draft head.

    Attributes:
        num_parameters: that are trained.
        num_bytes: of the exported head in bfloat16, with its copy of the embedding if it has one.
        num_projected: weights of the output projection that a draft pass reads.
        feature_bytes: of what a verifier leaves on disk for the head, a token.
        num_steps: times that a training step runs the head over a token.
    """

    num_parameters: int
    num_bytes: int
    num_projected: int
    feature_bytes: int
    num_steps: int


def _num_drafted(shape: DecoderSizes, train: HeadSettings) -> int:
    """Tokens that a head drafts among; how many cover a share of the answers is known later."""
    size = train.draft_vocab_size
    if size is None or size < 1:
        return shape.vocab_size if size is None else min(_COVERING_TOKENS, shape.vocab_size)
    return int(size)


def count_of_head(shape: DecoderSizes, train: HeadSettings) -> HeadCount:
    """Sizes of the head that is trained for a model of `shape`."""
    num_projected = _num_drafted(shape, train) * shape.hidden_size
    num, num_states, copied = shape.num_draft_parameters, 1, shape.num_embedding_parameters
    if train.kind == "none":
        return HeadCount(0, 0, 0, 0, 0)
    if train.kind == "eagle3":
        num += shape.num_layer_inputs_parameters + num_projected
        num_states = 4
    elif train.drafts_by_place:
        num, copied = _num_by_place(shape, train) + train.num_positions * num_projected, 0
    elif train.kind == "steering":
        # at most: the model that is steered is not larger than its target
        num, copied = train.adapter_rank * shape.hidden_size * (1 + shape.num_layers), 0
    elif train.kind == "early_exit":
        num, copied = shape.hidden_size * (1 + 2 * train.adapter_rank), 0
        num_states = 2
    return HeadCount(
        num_parameters=num,
        num_bytes=2 * (num + copied),
        num_projected=num_projected,
        feature_bytes=num_states * shape.hidden_size * shape.weight_bytes + _TOP_BYTES,
        num_steps=1 if train.drafts_by_place else train.num_levels,
    )


def _num_by_place(shape: DecoderSizes, train: HeadSettings) -> int:
    """Of the blocks of Medusa's or Hydra's heads; Hydra's read the path twice side by side."""
    size, places = shape.hidden_size, range(train.num_positions)
    if train.kind == "medusa":
        return len(places) * size * (size + 1)
    return sum(2 * size * ((place + 2) * size + 1) for place in places)


def shape_of_target(recipe: Recipe) -> DecoderSizes:
    """The target's sizes, from its config.json (fetched alone for a hub id).

    Raises:
        UserError: no checkpoint there, or an architecture that the runtime does not compute.
    """
    folder = config_folder(recipe.target.model, "target.model")
    return _shape_of_config(folder, recipe.group_size)


def shape_of_small(recipe: Recipe) -> DecoderSizes | None:
    """The smaller model's sizes, as `shape_of_target`; None for a recipe without one."""
    if recipe.small is None:
        return None
    folder = config_folder(recipe.small.model, "small.model")
    shape = _shape_of_config(folder, recipe.group_size)
    return replace(shape, in_blocks=recipe.quantize is None)


def shapes_of_intermediates(recipe: Recipe) -> tuple[DecoderSizes, ...]:
    """Of further models, as `shape_of_target`."""
    given = recipe.package.intermediates.items()
    folders = [config_folder(model, f"package.intermediates.{name}") for name, model in given]
    return tuple(_shape_of_config(folder, recipe.group_size) for folder in folders)


def has_weights(model: str) -> bool:
    """Whether the weights of a folder or hub id (model, adapter or head) lie on this machine."""
    if names_gguf(model):
        return (found := on_hub(model)) is None or _is_cached(found[0], found[1:2], found[2])
    folder = Path(model).expanduser()
    if folder.exists():
        return any((folder / name).is_file() for name in _WEIGHT_NAMES)
    repository, revision = split_hub_id(model)
    return _is_cached(repository, _WEIGHT_NAMES, revision)


def _is_cached(repository: str, names: Sequence[str], revision: str | None) -> bool:
    """Whether one of these files of a repository is in the hub's cache."""
    from huggingface_hub import try_to_load_from_cache

    return any(
        isinstance(try_to_load_from_cache(repository, name, revision=revision), str)
        for name in names
    )


def _shape_of_config(folder: Path, group_size: GroupSize) -> DecoderSizes:
    config = read_config(folder)
    content, decoder = config.content, config.decoder
    dtype = content.get("dtype") or content.get("torch_dtype")
    return DecoderSizes(
        vocab_size=decoder.vocab_size,
        hidden_size=decoder.hidden_size,
        intermediate_size=decoder.intermediate_size,
        num_layers=decoder.num_layers,
        num_heads=decoder.num_heads,
        num_kv_heads=decoder.num_kv_heads,
        head_size=decoder.head_dim,
        is_tied=decoder.tie_word_embeddings,
        weight_bytes=4 if dtype == "float32" else 2,
        num_layer_vectors=_num_layer_vectors(decoder),
        num_encoder_parameters=_num_encoder_parameters(decoder),
        group_size=_group_size(group_size, (shape[1] for shape in linear_shapes(decoder).values())),
    )


def _group_size(wanted: GroupSize, in_sizes: Iterable[int]) -> int:
    """Of a 4-bit copy; any of a model that has none, which `check_quantizable` refuses."""
    return (largest_group_size(in_sizes) or GROUP_SIZE) if wanted == "auto" else wanted


def _num_encoder_parameters(decoder: DecoderConfig) -> int:
    return sum(prod(shape) for _, shape in encoder_shapes(decoder))


def _num_layer_vectors(decoder: DecoderConfig) -> int:
    queries = decoder.num_heads * decoder.head_dim
    keys = decoder.num_kv_heads * decoder.head_dim
    biases = {
        "q_proj": queries,
        "k_proj": keys,
        "v_proj": keys,
        "o_proj": decoder.hidden_size,
        "gate_proj": decoder.intermediate_size,
        "up_proj": decoder.intermediate_size,
        "down_proj": decoder.hidden_size,
    }
    num = sum(biases[name] for name in decoder.biased)
    num += 2 * decoder.head_dim if decoder.has_head_norms else 0
    if decoder.encoder is not None:
        source = source_linears(decoder).values()
        num += (
            sum(prod(shape) for parts in source for shape in parts.values()) + decoder.hidden_size
        )
    return num + (2 * decoder.hidden_size if decoder.has_post_norms else 0)


def config_folder(model: str, key: str) -> Path:
    """The folder of a model's config.json, which is fetched alone for a hub id.

    Args:
        model: as `resolve_model` takes it.
        key: of the recipe, for errors.

    Raises:
        UserError: there is none.
    """
    if names_gguf(model):
        if not has_weights(model):
            raise UserError(
                "sizes are not known yet", f"{key} = {model}", "download the file first"
            )
        return resolve_model(model)
    folder = Path(model).expanduser()
    if folder.exists():
        if not (folder / "config.json").is_file():
            raise UserError(
                "not a checkpoint",
                f"{folder} (no config.json in it)",
                "name a folder that holds config.json",
            )
        return folder
    folder = snapshot(*split_hub_id(model), ["config.json"])
    if not (folder / "config.json").is_file():
        raise UserError(
            "not a checkpoint", f"{key} = {model} (no config.json in it)", "name another one"
        )
    return folder
