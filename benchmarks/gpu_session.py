"""What the parts of the GPU benchmark share: what is measured, and the chains that answer."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from growth.chain import grow_chain
from growth.shapes import SHAPES as GROWN_SHAPES
from growth.shapes import GrownShape
from measuring import Bandwidth, measure_bandwidth
from passes import PassSettings
from products import SHAPES
from systems import prompts_of_length, system_plans

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.checkpoints.config import read_config
from polybasic.chain.formats.plan import Plan
from polybasic.chain.formats.verify import check_chain
from polybasic.deploy import Chain, load_chain

TARGET, EAGLE2, THREE = "target", "eagle2", "polybasic_full"
FIRST, SECOND = "gpu-7b", "gpu-8b"
ROOM_TOKENS = 64
"""Of a context after an answer, for rounds that gain more than they must."""


@dataclass(frozen=True)
class GpuSettings:
    """What is measured.

    Attributes:
        contexts: tokens before an answer, the shortest first.
        sequences: numbers of them that are answered at a time.
        num_prompts, num_plan_prompts: asked after the shortest context, and for plans.
        num_long_prompts: asked after each longer context, with half as many new tokens.
        trees: depth, top k and rows of drafts that are tried and timed.
        bandwidth_bytes, product_bytes: of a buffer, and of the weights that a kernel multiplies
            with; None for the defaults.
    """

    contexts: tuple[int, ...] = (100, 2048, 8192)
    num_prompts: int = 8
    num_plan_prompts: int = 3
    num_long_prompts: int = 4
    num_hf_prompts: int = 2
    max_new_tokens: int = 256
    turns: int = 3
    sequences: tuple[int, ...] = (1, 2, 4, 8)
    trees: tuple[tuple[int, int, int], ...] = (
        (10, 2, 24), (8, 4, 32), (6, 8, 48), (7, 10, 60), (5, 4, 16), (6, 2, 12),
    )  # fmt: skip
    flush_lengths: tuple[int, ...] = (8, 12, 16, 24, 32)
    passes: PassSettings = field(
        default_factory=lambda: PassSettings(
            contexts=(256, 8192), rows=(1, 24, 8, 16, 2, 4, 32, 48, 64), repeats=5, turns=3
        )
    )
    product_shapes: tuple[str, ...] = SHAPES["cuda"]
    product_rows: tuple[int, ...] = (1, 24, 8, 16, 32, 64)
    attention_rows: tuple[int, ...] = (1, 8, 24, 40)
    bandwidth_bytes: int | None = None
    product_bytes: int | None = None
    dtype: str = "bfloat16"


REHEARSAL = GpuSettings(
    contexts=(20, 120),
    num_prompts=1,
    num_plan_prompts=1,
    num_long_prompts=1,
    num_hf_prompts=1,
    max_new_tokens=8,
    turns=1,
    sequences=(2,),
    trees=((2, 2, 4),),
    flush_lengths=(4,),
    passes=PassSettings(contexts=(16,), rows=(1, 24), repeats=2, turns=1),
    product_shapes=("128x256",),
    product_rows=(1, 3),
    attention_rows=(1, 4),
    bandwidth_bytes=1 << 22,
    product_bytes=1 << 16,
)
"""Everything once, over shapes little larger than the small chain's."""


@dataclass
class GpuSession:
    """What the parts of one process share.

    Attributes:
        small: folder of the small chain.
        prompts: question files, the more important first; None is the shipped prompts.
        record: that is written, beside which a trace stays.
        work: a folder for what is made on the way.
        parts: by name, as the record has them; see benchmarks/gpu.py.
    """

    small: Path
    prompts: list[Path | None]
    record: Path
    work: Path
    device: torch.device
    parts: dict[str, dict[str, Any]] = field(default_factory=dict)
    chains: dict[str, Chain] = field(default_factory=dict)

    @property
    def settings(self) -> GpuSettings:
        return REHEARSAL if self.device.type == "cpu" else GpuSettings()

    def chain(self, name: str) -> Chain:
        """The small chain in a shape; grown and loaded when it is first asked for.

        Raises:
            UserError: other members than a target, its 4-bit copy and an EAGLE-2 head.
        """
        if name not in self.chains:
            members = check_chain(self.small).manifest.members
            if [member.kind for member in members] != ["decoder", "awq", "eagle2"]:
                raise UserError(
                    "chain of other members",
                    f"{self.small}: {', '.join(member.kind for member in members)}",
                    "name a chain of a target, its 4-bit copy and an EAGLE-2 head",
                )
            out = self.work / name
            grow_chain(self.small, self._shape(name), name, out, device=self.device)
            self.chains[name] = self._loaded(name, self.settings.contexts[-1], 1)
        return self.chains[name]

    def _loaded(self, name: str, context: int, sequences: int) -> Chain:
        settings = self.settings
        room = context + settings.max_new_tokens + ROOM_TOKENS
        chain = load_chain(
            self.work / name, device=str(self.device), dtype=settings.dtype, context_tokens=room,
            digests=False, beyond_declared=True, sequences=sequences,
        )  # fmt: skip
        # text after the end means little, and answers are as long as those of large models
        chain.stop_tokens = frozenset()
        return chain

    def chain_of_many(self, name: str) -> Chain:
        """The same, which `chain` has grown, for several sequences after the shortest context."""
        self.chain(name)
        return self._loaded(name, self.settings.contexts[0], max(self.settings.sequences))

    def _shape(self, name: str) -> GrownShape:
        shape = GROWN_SHAPES[name]
        if self.device.type == "cuda":
            return shape
        small = read_config(check_chain(self.small).target).decoder
        is_grouped = shape.num_kv_heads < shape.num_heads
        return GrownShape(
            num_layers=small.num_layers,
            hidden_size=2 * small.hidden_size,
            intermediate_size=small.intermediate_size + 128,
            num_heads=2 * small.num_heads,
            num_kv_heads=(1 if is_grouped else 2) * small.num_heads,
            head_dim=small.head_dim,
            vocab_size=small.vocab_size + 32,
        )

    def plans(self, name: str) -> dict[str, Plan]:
        """What runs in each system: found for the shape, else for the first one, or the chain's."""
        plans = system_plans(self.chain(name))
        plans = {system: plans[system] for system in (TARGET, EAGLE2, THREE)}
        for shape in dict.fromkeys((FIRST, name)):
            chosen = self.parts.get(f"{shape} plans", {}).get("plans", {})
            plans |= {system: Plan.model_validate(plan) for system, plan in chosen.items()}
        return plans

    def bandwidth(self) -> Bandwidth:
        return measure_bandwidth(self.device, self.settings.bandwidth_bytes)

    def prompts_of(self, name: str, context: int, num: int, source: int = 0) -> list[list[int]]:
        """So many prompts of about `context` tokens, of one of the question files."""
        tokens, path = self.settings.max_new_tokens, self.prompts[source]
        return prompts_of_length(self.chain(name), path, context, num, tokens)
