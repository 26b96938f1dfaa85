"""What the parts of the GPU benchmark share: settings, places, and the chains in full size."""

from dataclasses import dataclass, field
from pathlib import Path

import torch
from gpu_answers import AnswerSettings, base_plans
from gpu_attention import AttentionSettings
from gpu_budget import Record
from gpu_chains import Grown, KeptWeights, grow_and_load, rehearsal_shape
from gpu_passes import PassSettings
from gpu_products import ProductSettings
from gpu_prompts import prompts_of_lengths
from timing import measure_bandwidth

from polybasic.chain.formats.config import read_config
from polybasic.chain.formats.plan import Plan, Tree
from polybasic.chain.formats.verify import check_chain
from polybasic.deploy.bench.baselines import TransformersBaseline
from polybasic.recipes.growth.shapes import SHAPES, GrownShape

ROOM_TOKENS = 64
"""Of a context behind an answer, for rounds that gain more than they must."""


@dataclass(frozen=True)
class Settings:
    """What is measured.

    Attributes:
        contexts: tokens before an answer, the shortest first; rows of passes and products stand
            in the order of their importance.
        num_prompts, num_plan_prompts: asked behind the shortest context, and for plans.
        num_long_prompts: asked behind each longer context.
        answers, long_answers: behind the shortest context and behind longer ones.
        trees: depth, top k and rows of drafts that are tried and timed.
        bandwidth_bytes: of a buffer that bandwidth is measured on.
        shapes: that the small chain is grown to, the more important first.
    """

    contexts: tuple[int, ...]
    num_prompts: int
    num_plan_prompts: int
    num_long_prompts: int
    trees: tuple[tuple[int, int, int], ...]
    flush_lengths: tuple[int, ...]
    answers: AnswerSettings
    long_answers: AnswerSettings
    passes: PassSettings
    products: ProductSettings
    attention: AttentionSettings
    bandwidth_bytes: int
    dtype: str = "bfloat16"
    shapes: tuple[str, ...] = ("gpu-7b", "gpu-8b")

    @property
    def drafts(self) -> list[Tree]:
        """The shapes of drafts."""
        return [Tree(depth=depth, top_k=top_k, rows=rows) for depth, top_k, rows in self.trees]


FULL = Settings(
    contexts=(100, 2048, 8192),
    num_prompts=8,
    num_plan_prompts=3,
    num_long_prompts=4,
    trees=((10, 2, 24), (8, 4, 32), (6, 8, 48), (7, 10, 60), (5, 4, 16), (6, 2, 12)),
    flush_lengths=(8, 12, 16, 24, 32),
    answers=AnswerSettings(max_new_tokens=256, turns=3, hf_prompts=2),
    long_answers=AnswerSettings(max_new_tokens=128, turns=2, hf_prompts=1),
    passes=PassSettings(
        contexts=(256, 8192), rows=(1, 24, 8, 16, 2, 4, 32, 48, 64), repeats=5, turns=3
    ),
    products=ProductSettings(rows=(1, 24, 8, 16, 32, 64), repeats=5, turns=3),
    attention=AttentionSettings(
        contexts=(256, 2048, 8192), rows=(1, 8, 24, 40), repeats=5, turns=3
    ),
    bandwidth_bytes=4 << 30,
)
REHEARSAL = Settings(
    contexts=(20, 120),
    num_prompts=1,
    num_plan_prompts=1,
    num_long_prompts=1,
    trees=((2, 2, 4),),
    flush_lengths=(4,),
    answers=AnswerSettings(max_new_tokens=12, turns=1, hf_prompts=1),
    long_answers=AnswerSettings(max_new_tokens=8, turns=1, hf_prompts=1),
    passes=PassSettings(contexts=(16,), rows=(1, 24), repeats=2, turns=1),
    products=ProductSettings(rows=(1, 3), repeats=2, turns=1),
    attention=AttentionSettings(contexts=(16,), rows=(1, 4), repeats=2, turns=1),
    bandwidth_bytes=1 << 22,
)
"""Everything once, over shapes little larger than the small chain's."""


@dataclass(frozen=True)
class Places:
    """Where things lie.

    Attributes:
        small: folder of the small chain.
        prompts: question files, the more important first; None is the embedded prompts.
        record: the file to write.
        work: a folder for what is made on the way.
    """

    small: Path
    prompts: tuple[Path | None, ...]
    record: Path
    work: Path


@dataclass
class Session:
    """What the parts of one process share."""

    settings: Settings
    places: Places
    record: Record
    device: torch.device
    serve: list[KeptWeights] = field(default_factory=list)
    _grown: dict[str, Grown] = field(default_factory=dict)
    _baselines: dict[str, TransformersBaseline] = field(default_factory=dict)

    @property
    def is_rehearsal(self) -> bool:
        """Whether shapes stand for large ones."""
        return self.device.type == "cpu"

    def grown(self, name: str) -> Grown:
        """The small chain in a shape; grown and loaded when it is first asked for."""
        if name not in self._grown:
            longest = self.settings.contexts[-1] + self.settings.answers.max_new_tokens
            self._grown[name] = grow_and_load(
                self.places.small,
                self._shape(name),
                name,
                self.places.work / name,
                self.serve,
                self.device,
                self.settings.dtype,
                longest + ROOM_TOKENS,
            )
        return self._grown[name]

    def baseline(self, name: str) -> TransformersBaseline:
        """transformers' loop over the target of a grown chain."""
        if name not in self._baselines:
            self._baselines[name] = self.grown(name).hf_generate()
        return self._baselines[name]

    def plans(self, name: str) -> dict[str, Plan]:
        """What runs in each system: found for the shape, else for the first one, or the chain's."""
        plans = base_plans(self.grown(name).chain)
        for shape in dict.fromkeys((self.settings.shapes[0], name)):
            chosen = self.record.found(f"{shape} plans").get("chosen", {})
            plans |= {system: Plan.model_validate(plan) for system, plan in chosen.items()}
        return plans

    def bandwidth(self) -> float:
        """Of copies, in bytes a second, by which bounds are computed."""
        found = self.record.found("machine")
        if not found:
            return measure_bandwidth(self.device, self.settings.bandwidth_bytes).copy.median
        return float(found["bandwidth"]["copy"]["median"])

    def prompts(self, name: str, context: int, num: int, source: int = 0) -> list[list[int]]:
        """So many prompts of about `context` tokens, of one of the question files."""
        chain, tokens = self.grown(name).chain, self.settings.answers.max_new_tokens
        path = self.places.prompts[source]
        return prompts_of_lengths(chain, path, [context], num, tokens)[context]

    def source_name(self, source: int) -> str:
        """What a question file is called in a record."""
        path = self.places.prompts[source]
        return "embedded" if path is None else path.stem

    def _shape(self, name: str) -> GrownShape:
        if not self.is_rehearsal:
            return SHAPES[name]
        small = read_config(check_chain(self.places.small).target).decoder
        is_grouped = SHAPES[name].num_kv_heads < SHAPES[name].num_heads
        return rehearsal_shape(small, (1 if is_grouped else 2) * small.num_heads)
