"""Chains of small real models with random weights, and a memory of their passes.

A law by counting takes some hundred thousand answers. Of three tokens there are few prefixes, so
each pass, each warped distribution and each draft is computed once, by the verifier, the sampler
and the drafter that serve, and looked up from then on. All else runs for real in every answer:
stages, caches' bookkeeping, walks, verification and draws, with the noise of each answer's seed.
That noise is left out of drafts alone, so that there are few of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polybasic.chain.formats.checkpoints.config import head_config
from polybasic.chain.formats.checkpoints.decoder_config import DecoderConfig, HeadConfig
from polybasic.chain.formats.checkpoints.shapes import expected_shapes
from polybasic.chain.formats.head_kinds.dflash import DFlashBlock, Markov
from polybasic.chain.formats.head_kinds.table import HEAD_KINDS
from polybasic.chain.formats.plan import Plan
from polybasic.chain.heads.medusa import medusa_config
from polybasic.chain.kernels.backend import Backend
from polybasic.chain.kernels.drafts import DraftTree
from polybasic.chain.kernels.executor import Executor
from polybasic.chain.kernels.rotary import RotaryTable
from polybasic.chain.kernels.selection import backend_for
from polybasic.chain.kernels.torch.corrections import MarkovWeights
from polybasic.chain.kernels.torch.dflash import DFlashExecutor, DFlashWeights
from polybasic.chain.kernels.torch.steering import SteeredExecutor
from polybasic.chain.kernels.weights import LayerWeights, ModelWeights, PositionWeights
from polybasic.chain.model.early_exit import early_exit
from polybasic.chain.model.medusa import medusa_executor
from polybasic.chain.model.steering import steered
from polybasic.chain.model.stored import GivenTensors
from polybasic.deploy.runtime.drafters.early_exit import EarlyExitDrafter
from polybasic.deploy.runtime.drafters.interface import Drafter
from polybasic.deploy.runtime.drafters.steering import SteeredDrafter
from polybasic.deploy.runtime.engine import Engine
from polybasic.deploy.runtime.models import Models
from polybasic.deploy.runtime.request import Request
from polybasic.deploy.runtime.rounds.noise import Noise
from polybasic.deploy.runtime.rounds.pace import PromptPace
from polybasic.deploy.runtime.rounds.passes import alone
from polybasic.deploy.runtime.rounds.sampling import (
    CoupledSampler,
    GreedyRows,
    Prefixes,
    Probabilities,
    RandomSampler,
    Sampler,
    Sampling,
)
from polybasic.deploy.runtime.rounds.stages import BlockStage, Stage, TreeStage
from polybasic.deploy.runtime.rounds.verifier import Verifier
from polybasic.deploy.runtime.rounds.warping import truncate

VOCAB_SIZE = 6
CPU = torch.device("cpu")
CONTEXT_TOKENS = 16
NUM_POSITIONS = 300


def small_config(num_layers: int, hidden_size: int) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_layers=num_layers,
        num_heads=4,
        num_kv_heads=2,
        head_dim=hidden_size // 4,
        rms_norm_eps=1e-5,
        context_tokens=NUM_POSITIONS,
        tie_word_embeddings=False,
        rope={"rope_type": "default", "rope_theta": 10000.0},
    )


@dataclass
class Weights:
    """Random weights in the order in which they are asked for.

    Attributes:
        noise: share of a second, different set of weights.
    """

    seed: int
    noise: float = 0.0

    def __post_init__(self) -> None:
        self._first = torch.Generator().manual_seed(self.seed)
        self._second = torch.Generator().manual_seed(self.seed + 1000)

    def normal(self, *shape: int) -> Tensor:
        first = torch.randn(*shape, generator=self._first)
        second = torch.randn(*shape, generator=self._second)
        return ((1 - self.noise**2) ** 0.5 * first + self.noise * second) / shape[-1] ** 0.5

    def layer(
        self, config: DecoderConfig, backend: Backend, has_input_norm: bool, kind: int = 0
    ) -> LayerWeights:
        width, inner = config.hidden_size, config.intermediate_size
        rows = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        return LayerWeights(
            kind,
            backend.dense(2 * self.normal(rows, width)),
            backend.dense(2 * self.normal(width, width)),
            backend.dense(2 * self.normal(2 * inner, width)),
            backend.dense(2 * self.normal(width, inner)),
            torch.ones(width),
            torch.ones(width) if has_input_norm else None,
        )

    def decoder(self, config: DecoderConfig) -> Executor:
        backend = backend_for(CPU, torch.float32, config)
        embedding = self.normal(VOCAB_SIZE, config.hidden_size) * config.hidden_size**0.5
        layers = [
            self.layer(config, backend, has_input_norm=True, kind=config.kind_of(index))
            for index in range(config.num_layers)
        ]
        lm_head = 1.2 * self.normal(VOCAB_SIZE, config.hidden_size)
        weights = ModelWeights(
            config,
            embedding,
            tuple(layers),
            RotaryTable(config, NUM_POSITIONS, torch.float32, CPU),
            backend.dense(lm_head),
            final_norm=torch.ones(config.hidden_size),
            draft_lm_head=lambda token_ids: backend.dense(lm_head[token_ids]),
        )
        return backend.executor(weights)

    def head(self, decoder: Executor) -> Executor:
        """Of a random layer after a mean of embedding and feature."""
        width, verifier = decoder.config.hidden_size, decoder.weights
        config = small_config(1, width)
        backend = backend_for(CPU, torch.float32, config)
        mean = torch.cat([torch.eye(width), torch.eye(width)], -1) / 2
        fc = backend.dense(mean + self.normal(width, 2 * width) / 2)
        layer = self.layer(config, backend, has_input_norm=False)
        rotary = RotaryTable(config, NUM_POSITIONS, torch.float32, CPU)
        weights = ModelWeights(
            config, verifier.embedding, (layer,), rotary, verifier.lm_head, fc=fc
        )
        return backend.executor(weights)

    def block_head(
        self, decoder: Executor, num_positions: int = 3, mask_token_id: int | None = None
    ) -> Executor:
        """A block-parallel one of two layers, whose bigrams say much."""
        width, verifier = decoder.config.hidden_size, decoder.weights
        config = small_config(2, width)
        backend = backend_for(CPU, torch.float32, config)
        mean = torch.cat([torch.eye(width), torch.eye(width)], -1) / 2
        fc = backend.dense(mean + self.normal(width, 2 * width) / 2)
        layers = tuple(self.layer(config, backend, has_input_norm=True) for _ in range(2))
        positions = PositionWeights(
            3 * self.normal(num_positions - 1, width),
            4 * self.normal(VOCAB_SIZE, 16),
            4 * self.normal(VOCAB_SIZE, 16),
            mask_token_id,
        )
        weights = ModelWeights(
            config,
            verifier.embedding,
            layers,
            RotaryTable(config, NUM_POSITIONS, torch.float32, CPU),
            verifier.lm_head,
            fc=fc,
            positions=positions,
        )
        return backend.executor(weights)

    def dflash_head(self, decoder: Executor) -> DFlashExecutor:
        """A DFlash one of two layers that reads the first layer's input, with DSpark's bigrams."""
        width, verifier = decoder.config.hidden_size, decoder.weights
        config = small_config(2, width)
        backend = backend_for(CPU, torch.float32, config)
        markov = MarkovWeights(
            4 * self.normal(VOCAB_SIZE, 16), backend.dense(self.normal(VOCAB_SIZE, 16))
        )
        return DFlashExecutor(
            DFlashWeights(
                config,
                verifier.embedding,
                tuple(self.layer(config, backend, has_input_norm=True) for _ in range(2)),
                RotaryTable(config, NUM_POSITIONS, torch.float32, CPU),
                verifier.lm_head,
                final_norm=torch.ones(width),
                fc=backend.dense(self.normal(width, width)),
                feature_norm=torch.ones(width),
                feature_layers=(0,),
                block=DFlashBlock(3, VOCAB_SIZE - 1, True, None, Markov(16, "vanilla", 0)),
                corrector=markov,
            )
        )

    def heads_by_place(self, decoder: Executor, kind: str, num_heads: int = 2) -> Executor:
        """Medusa's or Hydra's, of random matrices."""
        verifier = decoder.weights
        content = medusa_config(HEAD_KINDS[kind], decoder.config, num_heads, 1, "float32")
        config = head_config(content, "test")
        shapes = expected_shapes(kind, config, None, set())
        tensors = GivenTensors(
            {name: 2 * self.normal(*shape) for name, shape in shapes}, torch.float32, CPU
        )
        backend = backend_for(CPU, torch.float32, decoder.config)
        return medusa_executor(config, tensors, backend, verifier.embedding, None)

    def early_exit(self, decoder: Executor, exit_layer: int) -> Executor:
        """Behind the first layers, with an adapter."""
        width, weights = decoder.config.hidden_size, decoder.weights
        sizes = vars(small_config(0, width))
        config = HeadConfig(**sizes, kind="early_exit", exit_layer=exit_layer, adapter_rank=16)
        tensors = {
            "norm.weight": torch.ones(width),
            "adapter.down.weight": self.normal(16, width),
            "adapter.up.weight": self.normal(width, 16),
        }
        given = GivenTensors(tensors, torch.float32, CPU)
        whole = decoder.over(replace(weights, draft_lm_head=lambda token_ids: weights.lm_head))
        return early_exit(config, given, whole, None)

    def steered(self, decoder: Executor, verifier: Executor) -> Executor:
        """A decoder that states of `verifier` steer."""
        width, config = verifier.config.hidden_size, decoder.config
        size = config.num_layers * config.hidden_size
        tensors = {"down.weight": self.normal(16, width), "up.weight": self.normal(size, 16)}
        return steered(GivenTensors(tensors, torch.float32, CPU), decoder, width)


@dataclass(frozen=True)
class SmallChain:
    """An engine over small models, and what it is asked.

    Attributes:
        num_tokens: that may be generated.
        num_counted: first tokens of an answer that are looked at.
    """

    engine: Engine
    plan: Plan
    sampling: Sampling
    prompt: list[int]
    num_tokens: int
    num_counted: int

    def answer(self, seed: int) -> tuple[int, ...]:
        """The counted tokens, by the engine itself."""
        sampling = replace(self.sampling, seed=seed)
        request = Request(self.prompt, self.num_tokens, sampling, (), self.plan)
        tokens: list[int] = []
        for batch in self.engine.run(request):
            tokens += batch
            if len(tokens) >= self.num_counted:
                break
        return tuple(tokens[: self.num_counted])


def small_chain(
    decoders: dict[str, Executor],
    head: Executor,
    plan: Plan,
    sampling: Sampling,
    prompt: list[int],
    num_tokens: int = 4,
) -> SmallChain:
    """A chain whose head, or early exit, drafts for the last of the decoders."""
    verifying, drafter = plan.members[-2:]
    models = Models(decoders, {drafter: head}, {drafter: (verifying,)}, CONTEXT_TOKENS)
    if isinstance(head, SteeredExecutor):
        models.makers[drafter] = SteeredDrafter
    if head.weights.adapter is not None:
        models.sharing_makers[drafter] = EarlyExitDrafter
    return SmallChain(Engine(models), plan, sampling, prompt, num_tokens, num_counted=3)


# The memory


@dataclass
class Memory:
    """Rows that were computed once.

    A row is a token read by a model after the rows that it saw, each known by its number.

    Attributes:
        numbers: (model, rows seen, token) -> the row's number.
        cached: by number, keys and values [2K, H] of each layer.
        states: by number, [D].
        logits: by number, [V].
        warped: (rows, what stands before each) -> what they are drawn from.
    """

    numbers: dict[tuple[str, tuple[int, ...], int], int] = field(default_factory=dict)
    cached: list[list[Tensor]] = field(default_factory=list)
    states: list[Tensor] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    warped: dict[Any, Tensor] = field(default_factory=dict)

    def drawn_from(self, rows: Any, prefixes: Prefixes, warp: Callable[[Tensor], Tensor]) -> Tensor:
        """Rows warped, each once for each prefix."""
        key = (rows.tobytes(), tuple(prefixes.sequence), tuple(map(tuple, prefixes.suffixes)))
        if key not in self.warped:
            self.warped[key] = warp(torch.stack([self.logits[row] for row in rows.tolist()]))
        return self.warped[key]


class RememberedCache:
    """Row numbers in the place of keys and values."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.length = 0

    def keep(self, rows: Sequence[int]) -> None:
        self.rows[self.length :] = [self.rows[self.length + row] for row in rows]
        self.length = len(self.rows)

    def truncate(self, length: int) -> None:
        assert 0 <= length <= self.length
        self.length = length


class RememberedVerifier:
    """Runs the real verifier over what it has not read before; states are arrays of numbers."""

    pace = PromptPace(torch.device("cpu"))

    def __init__(self, real: Verifier, cache: RememberedCache, memory: Memory) -> None:
        self.name, self.real, self.cache, self.memory = real.name, real, cache, memory
        self._passes: dict[Any, list[int]] = {}

    def see(self, token_ids: Sequence[int]) -> None:
        """All tokens have logits."""

    def read(self, tokens: list[int]) -> Any:
        return self._read(tokens, None)

    def read_tree(self, tree: DraftTree) -> Any:
        return self._read(tree.tokens, tree)

    def logits(self, states: Any) -> Any:
        return states

    def number_of(self, seen: tuple[int, ...], token: int) -> int:
        """The number of a token's row after the rows that it sees."""
        return self._pass(seen, [token], None)[0]

    def _read(self, tokens: list[int], tree: DraftTree | None) -> Any:
        numbers = self._pass(tuple(self.cache.rows[: self.cache.length]), tokens, tree)
        self.cache.rows[self.cache.length :] = numbers
        return np.array(numbers)

    def _pass(self, seen: tuple[int, ...], tokens: list[int], tree: DraftTree | None) -> list[int]:
        key = (seen, tuple(tokens), None if tree is None else tuple(tree.parents))
        numbers = self._passes.get(key)
        if numbers is None:
            numbers = self._passes[key] = self._compute(seen, tokens, tree)
        return numbers

    def _compute(
        self, seen: tuple[int, ...], tokens: list[int], tree: DraftTree | None
    ) -> list[int]:
        memory, cache = self.memory, self.real.cache
        for place, number in enumerate(seen):
            for layer, cached in zip(cache.layers, memory.cached[number], strict=True):
                layer[:, place] = cached
        cache.length = len(seen)
        states = self.real.read(tokens) if tree is None else self.real.read_tree(tree)
        logits = self.real.logits(states)
        parents = range(-1, len(tokens) - 1) if tree is None else tree.parents
        rows_seen: list[tuple[int, ...]] = []
        numbers: list[int] = []
        for row, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
            rows_seen.append(seen if parent < 0 else (*rows_seen[parent], numbers[parent]))
            number = memory.numbers.setdefault(
                (self.name, rows_seen[row], token), len(memory.states)
            )
            if number == len(memory.states):
                memory.cached.append([layer[:, len(seen) + row].clone() for layer in cache.layers])
                memory.states.append(states[row])
                memory.logits.append(logits[row])
            numbers.append(number)
        return numbers


class RememberedDrafter:
    """Asks the real drafter what it was not asked before."""

    clock = None

    def __init__(self, real: Drafter, memory: Memory) -> None:
        self.real, self.memory, self.tree = real, memory, real.tree
        self._observed: list[int] = []
        self._drafts: dict[Any, DraftTree] = {}

    @property
    def num_observed(self) -> int:
        return len(self._observed)

    def observe(self, states: Any) -> None:
        self._observed += states.tolist()

    def rewind(self, num_observed: int) -> None:
        assert 0 <= num_observed <= len(self._observed)
        del self._observed[num_observed:]

    def draft(self, tokens: list[int], max_depth: int) -> DraftTree:
        key = (tuple(self._observed), tuple(tokens), max_depth)
        if key not in self._drafts:
            if isinstance(self.real, EarlyExitDrafter):
                self._write_rows(self.real)
            self.real.rewind(0)
            self.real.observe(torch.stack([self.memory.states[row] for row in self._observed]))
            self._drafts[key] = self.real.draft(tokens, max_depth)
        return self._drafts[key]

    def _write_rows(self, real: EarlyExitDrafter) -> None:
        """Those of the observed tokens, into the cache that the verifier has read them into."""
        for place, number in enumerate(self._observed):
            for layer, cached in zip(real.cache.layers, self.memory.cached[number], strict=False):
                layer[:, place] = cached
        real.verifier_cache.length = len(self._observed)


class RememberingSampler(RandomSampler):
    """Of the rules by block and by token."""

    def __init__(self, chain: SmallChain, memory: Memory, seed: int) -> None:
        settings = replace(chain.sampling, seed=seed)
        super().__init__(settings, CPU, len(chain.prompt), chain.plan.rule)
        self.memory = memory

    def distributions(self, logits: Any, prefixes: Prefixes) -> Probabilities:
        serving = super().distributions
        return Probabilities(
            self.memory.drawn_from(logits, prefixes, lambda rows: serving(rows, prefixes).values)
        )


class RememberingCoupledSampler(CoupledSampler):
    """Draws from warped rows, which are not warped again."""

    def __init__(self, chain: SmallChain, memory: Memory, seed: int) -> None:
        noise = Noise(chain.engine.models.target, replace(chain.sampling, seed=seed))
        super().__init__(Sampling(1.0), len(chain.prompt), noise)
        noise.at(range(len(chain.prompt), len(chain.prompt) + chain.num_tokens))  # all in one
        self.chain, self.memory = chain, memory

    def distributions(self, logits: Any, prefixes: Prefixes) -> GreedyRows:
        settings, num_prompt_tokens = self.chain.sampling, self.num_prompt_tokens

        def warp(rows: Tensor) -> Tensor:
            if self.constraint is not None:
                rows = self.constraint.restrict(rows, prefixes)
            return truncate(rows, settings, prefixes, num_prompt_tokens)

        return super().distributions(self.memory.drawn_from(logits, prefixes, warp), prefixes)


class RememberedChain:
    """The stages of a chain's plan over remembered models."""

    def __init__(self, chain: SmallChain) -> None:
        self.chain, self.memory = chain, Memory()
        caches: dict[int, RememberedCache] = {}
        self.verifiers: list[Any] = []
        for name in chain.plan.members[:-1]:
            window = chain.plan.windows.get(name)
            real = chain.engine.verifiers[name].seeing(window)
            cache = caches.setdefault(id(real.cache), RememberedCache())
            self.verifiers.append(RememberedVerifier(real, cache, self.memory))
        self.drafter: Any = RememberedDrafter(chain.engine.drafters.of(chain.plan), self.memory)

    def sampler(self, seed: int) -> Sampler:
        """Of the plan's rule."""
        is_coupled = self.chain.plan.rule == "coupled"
        make = RememberingCoupledSampler if is_coupled else RememberingSampler
        return make(self.chain, self.memory, seed)

    def answer(self, sampler: Sampler) -> tuple[int, ...]:
        """As `SmallChain.answer`."""
        chain = self.chain
        stage: Stage = TreeStage(self.verifiers[-1], self.drafter, sampler)
        for verifier in reversed(self.verifiers[:-1]):
            stage = BlockStage(verifier, stage, sampler, chain.plan.flush[verifier.name])
        stage.begin(chain.prompt, 0)
        tokens = alone(stage.start(chain.prompt)).tokens
        while len(tokens) < chain.num_counted:
            tokens += alone(stage.propose(1, chain.num_tokens - len(tokens))).tokens
        return tuple(tokens[: chain.num_counted])
