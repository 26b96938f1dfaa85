"""Drafters of several kinds, each with its definition in plain operations."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from polybasic.chain.formats.checkpoints.checkpoint import load_tensors
from polybasic.chain.formats.checkpoints.config import read_config
from polybasic.chain.formats.plan import Tree
from polybasic.chain.kernels.drafts import DraftTree
from polybasic.chain.kernels.executor import Executor
from polybasic.chain.model.dflash import load_dflash
from polybasic.chain.model.loading import load_head
from polybasic.chain.model.medusa import load_medusa
from polybasic.deploy.runtime.drafters.head import EagleDrafter
from polybasic.deploy.runtime.drafters.model import ModelDrafter
from polybasic.deploy.runtime.rounds.cache import KeyValueCache
from polybasic.deploy.runtime.rounds.verifier import Verifier
from tests.deploy.plain_dflash import PlainDFlash
from tests.deploy.plain_eagle3 import PlainEagle3, PlainPEagle
from tests.head_kinds import (
    DFLASH_WINDOW,
    FEATURE_LAYERS,
    PEAGLE_MASK,
    write_dflash,
    write_eagle3,
    write_medusa,
    write_peagle,
)

CPU, CAPACITY, VOCAB_SIZE = torch.device("cpu"), 200, 64
DRAFTED = torch.arange(1, VOCAB_SIZE, 5)
"""By trimmed heads."""
AnyDrafter = EagleDrafter | ModelDrafter


@dataclass(frozen=True)
class Models:
    """A target, its 4-bit copy and its head, in float32."""

    target: Executor
    intermediate: Executor
    head: Executor


@dataclass(frozen=True)
class Case:
    """A drafter and its definition.

    Attributes:
        make: a drafter of this shape.
        log_probabilities: states of the sequence, the sequence, a path below its last token
            -> log-probabilities [V] of the token after the path.
        reads_root: whether drafts depend on the last token of the sequence.
    """

    target: Executor
    make: Callable[[Tree], AnyDrafter]
    log_probabilities: Callable[[Tensor, list[int], list[int]], Tensor]
    feature_layers: tuple[int, ...] = ()
    reads_root: bool = True

    def states(self, tokens: list[int]) -> Tensor:
        """The target's states [R, D]; [0, D] of no tokens."""
        if not tokens:
            return torch.zeros(0, self.target.states_width(self.feature_layers))
        layers = self.feature_layers
        verifier = Verifier("target", self.target, cache_of(self.target), feature_layers=layers)
        return verifier.read(tokens)


def cache_of(decoder: Executor) -> KeyValueCache:
    config = decoder.config
    return KeyValueCache(config, config.num_layers, CAPACITY, torch.float32, CPU)


def best_paths(
    of: Callable[[list[int]], Tensor], tree: Tree, text: Sequence[int] = ()
) -> set[tuple[int, ...]]:
    """EAGLE-2's definition: expand the best of each level, keep the best of all.

    Args:
        of: tokens -> log-probabilities [V] of the next one.
        text: up to the root; what is before a path in these tokens.
    """
    beam: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    pool: list[tuple[float, tuple[int, ...]]] = []
    for _ in range(tree.depth):
        level = []
        for score, path in beam:
            best = of([*text, *path]).topk(tree.top_k)
            level += [
                (score + value, (*path, token))
                for value, token in zip(best.values.tolist(), best.indices.tolist(), strict=True)
            ]
        pool += level
        beam = sorted(level, reverse=True)[: tree.top_k]
    # A child that is certain scores as its parent does: the parent comes first.
    best_first = sorted(pool, key=lambda scored: (-scored[0], len(scored[1])))
    return {path for _, path in best_first[: tree.rows - 1]}


def paths_of(tree: DraftTree) -> set[tuple[int, ...]]:
    """Tokens from below the root down to each candidate."""
    return {tuple(path) for path in tree.paths()[1:]}


def drafted_by(name: str) -> tuple[Tensor, Tensor | None]:
    """The tokens that a head of this name drafts, and those that it is trimmed to, if it is."""
    trimmed_to = DRAFTED if name.startswith("trimmed") else None
    return torch.arange(VOCAB_SIZE) if trimmed_to is None else trimmed_to, trimmed_to


def over_all_tokens(log_probabilities: Tensor, token_ids: Tensor) -> Tensor:
    """[V] of those of some tokens; the others are never drafted."""
    return torch.full((VOCAB_SIZE,), -torch.inf).index_put((token_ids,), log_probabilities)


def eagle3_case(target: Executor, folder: Path, target_folder: Path, name: str) -> Case:
    """A random EAGLE-3 head, or one of EAGLE-3.1."""
    token_ids, trimmed_to = drafted_by(name)
    variants = ("fc_norm", "norm_output") if name == "eagle3.1" else ()
    write_eagle3(folder, target_folder, trimmed_to, variants=variants)
    head, config = load_head(read_config(folder), target, CAPACITY), target.config
    weights = {
        name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()
    }
    plain = PlainEagle3(
        weights,
        target.weights.embedding,
        config.head_dim,
        config.rms_norm_eps,
        norms_residual="norm_before_residual" in variants,
        norms_output="norm_output" in variants,
    )

    def of_plain(states: Tensor, tokens: list[int], path: list[int]) -> Tensor:
        layers = states[:, config.hidden_size :]
        return over_all_tokens(plain.log_probabilities(layers, tokens[1:], path), token_ids)

    return Case(target, lambda tree: EagleDrafter(head, tree, CAPACITY), of_plain, FEATURE_LAYERS)


def medusa_case(target: Executor, folder: Path, target_folder: Path, name: str) -> Case:
    """Medusa's or Hydra's heads, computed one tensor after the other."""
    token_ids, trimmed_to = drafted_by(name)
    is_hydra = name.endswith("hydra")
    write_medusa(folder, target_folder, "hydra" if is_hydra else "medusa", trimmed_to)
    heads = load_medusa(read_config(folder), target, CAPACITY)
    weights = load_file(folder / "model.safetensors")

    def linear(name: str, x: Tensor) -> Tensor:
        bias = weights.get(f"{name}.bias")
        return F.linear(
            x, weights[f"{name}.weight"].float(), None if bias is None else bias.float()
        )

    def of_plain(states: Tensor, tokens: list[int], path: list[int]) -> Tensor:
        place = len(path)
        x = states[-1:]
        if is_hydra:
            read = target.weights.embedding[[tokens[-1], *path]].flatten()
            x = torch.cat([x[0], read])[None]
        kept = linear(f"blocks.{place}.residual", x) if is_hydra else x
        x = kept + F.silu(linear(f"blocks.{place}.layers.0", x))
        x = x + F.silu(linear(f"blocks.{place}.layers.1", x))
        return over_all_tokens(linear(f"lm_heads.{place}", x)[0].log_softmax(-1), token_ids)

    make = partial(EagleDrafter, heads, capacity=CAPACITY)
    return Case(target, make, of_plain, reads_root=is_hydra)


def dflash_case(target: Executor, folder: Path, target_folder: Path, name: str) -> Case:
    """A random DFlash head, or one of Domino's or DSpark's."""
    token_ids, trimmed_to = drafted_by(name)
    write_dflash(folder, target_folder, name.removeprefix("trimmed "), trimmed_to)
    file = read_config(folder)
    config = file.head
    plain = PlainDFlash(
        {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()},
        target.weights.embedding,
        load_tensors(target_folder)["lm_head.weight"].float()[token_ids],
        config.head_dim,
        config.rms_norm_eps,
        file.content["block_size"],
        file.content["dflash_config"],
        config.rope["rope_theta"],
        (DFLASH_WINDOW if "window" in name else None, None),
    )

    def of_plain(states: Tensor, tokens: list[int], path: list[int]) -> Tensor:
        layers = states[:, config.hidden_size :]
        return over_all_tokens(plain.log_probabilities(layers, tokens[-1], path), token_ids)

    make = partial(EagleDrafter, load_dflash(file, target, CAPACITY), capacity=CAPACITY)
    return Case(target, make, of_plain, FEATURE_LAYERS)


def peagle_case(target: Executor, folder: Path, target_folder: Path, name: str) -> Case:
    """A random P-EAGLE head."""
    token_ids, trimmed_to = drafted_by(name)
    write_peagle(folder, target_folder, trimmed_to)
    file = read_config(folder)
    config = file.head
    weights = {
        name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()
    }
    plain = PlainPEagle(
        weights,
        weights["embed_tokens.weight"],
        config.head_dim,
        config.rms_norm_eps,
        config.rope["rope_theta"],
        mask_token_id=PEAGLE_MASK,
    )

    def of_plain(states: Tensor, tokens: list[int], path: list[int]) -> Tensor:
        layers = states[:, config.hidden_size :]
        return over_all_tokens(plain.log_probabilities(layers, tokens[1:], path), token_ids)

    make = partial(EagleDrafter, load_head(file, target, CAPACITY), capacity=CAPACITY)
    return Case(target, make, of_plain, FEATURE_LAYERS)


def random_tokens(count: int) -> list[int]:
    return torch.randint(0, VOCAB_SIZE, (count,)).tolist()


CASES = {
    **dict.fromkeys(("eagle3", "trimmed eagle3", "eagle3.1"), eagle3_case),
    **dict.fromkeys(("medusa", "trimmed medusa", "hydra", "trimmed hydra"), medusa_case),
    **dict.fromkeys(("dflash", "dflash with a window", "trimmed domino"), dflash_case),
    **dict.fromkeys(("dspark vanilla", "trimmed dspark gated", "dspark rnn"), dflash_case),
    **dict.fromkeys(("peagle", "trimmed peagle"), peagle_case),
}
"""What makes a case, by its name."""
