"""How attention is divided, and what compilers make of it for GPUs that need not be there."""

import re
from dataclasses import replace
from functools import cache

import pytest

pytest.importorskip("triton")

from polybasic.chain.kernels.cuda.attention_plan import (
    MAX_TICKETS,
    NUM_WARPS,
    AttentionLayer,
    AttentionPlan,
    Gpu,
)
from tests.chain.kernels.cuda.compiling import (
    MOST_SHARED_BYTES,
    Compiled,
    Request,
    compiled,
)
from tests.chain.kernels.cuda.early_access import touched_before_wait

GPUS = {
    90: Gpu(132, MOST_SHARED_BYTES[90], is_hopper=True),
    80: Gpu(108, MOST_SHARED_BYTES[80], is_hopper=False),
    86: Gpu(82, 99 * 1024, is_hopper=False),
}
"""H200, A100, RTX 3090."""
VICUNA_7B = AttentionLayer(num_kv_heads=32, query_groups=1, head_dim=128, capacity=8192)
LLAMA3_8B = replace(VICUNA_7B, num_kv_heads=8, query_groups=4)
GEMMA2_9B = AttentionLayer(num_kv_heads=8, query_groups=2, head_dim=256, capacity=4096)
LAYERS = {
    "vicuna-7b": VICUNA_7B,
    "llama3-8b": LLAMA3_8B,
    "qwen2-7b": replace(VICUNA_7B, num_kv_heads=4, query_groups=7),
    "gemma2-9b": GEMMA2_9B,
    "phi3-mini": replace(VICUNA_7B, head_dim=96),
    "head of 80": replace(VICUNA_7B, head_dim=80),
    "head of 64, short": AttentionLayer(2, 7, 64, 100),
    "many heads": AttentionLayer(128, 1, 128, 1 << 17),
}
POINTERS = ("qkv", "cache", "out", "cos", "sin")
WIDE = ("positions", "prefix")
NUMBERS = (
    "num_rows", "first", "capacity", "num_positions", "num_tiles", "position_stride",
    "visible_stride", "visible_step", "tokens", "sinks",
)  # fmt: skip
FACTORS = ("scale", "softcap", "query_eps", "key_eps")


def request(
    plan: AttentionPlan, capability: int, unaligned: tuple[str, ...] = (), **features: bool
) -> Request:
    """The first kernel as a launch makes it; without norms."""
    is_early = capability == 90
    return Request(
        "polybasic.chain.kernels.cuda.attention_kernels",
        "attend",
        {
            **dict.fromkeys(POINTERS, "*bf16"),
            **dict.fromkeys(WIDE, "*i64"),
            **dict.fromkeys(NUMBERS, "i32"),
            **dict.fromkeys(FACTORS, "fp32"),
            "parts": "*fp32",
            "num_active": "*i32",
            "tickets": "*i32",
            "visible": "*u8",
        },
        {
            "query_norm": None,
            "key_norm": None,
            "first_rows": None,
            "counts": None,
            "IS_JOINED": False,
            "HAS_WINDOW": features.get("has_window", False),
            "IS_CAPPED": features.get("is_capped", False),
            "IS_EARLY": is_early,
            **plan.shape(),
            **plan.constants(),
        },
        (*WIDE, *NUMBERS, "visible", *unaligned),
        capability,
        {"num_warps": NUM_WARPS, "launch_pdl": is_early},
    )


def combining(plan: AttentionPlan) -> Request:
    """The second kernel."""
    signature = {"parts": "*fp32", "num_active": "*i32", "out": "*bf16"}
    module = "polybasic.chain.kernels.cuda.attention_kernels"
    constants = {**plan.shape(), "IS_EARLY": True}
    return Request(module, "combine", signature, constants, options={"launch_pdl": True})


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS.keys())
@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS.keys())
def test_a_plan_fits_its_gpu(gpu: Gpu, layer: AttentionLayer) -> None:
    for num_rows in range(1, 65):
        plan = AttentionPlan.of(gpu, layer, num_rows)
        assert plan.shared_bytes(gpu) <= gpu.shared_bytes
        assert plan.tile * plan.num_tiles >= num_rows * layer.query_groups
        assert plan.new_rows * plan.new_chunks >= num_rows
        assert plan.num_units <= MAX_TICKETS
        # at most one program for each processor, unless there are more heads than processors
        assert plan.parts == 1 or plan.num_units * plan.parts <= gpu.num_processors


def test_plans_by_shape() -> None:
    h200 = GPUS[90]
    single, tree = AttentionPlan.of(h200, VICUNA_7B, 1), AttentionPlan.of(h200, VICUNA_7B, 24)
    assert (single.tile, single.num_tiles, single.parts, single.combines) == (16, 1, 4, True)
    assert (tree.tile, tree.num_tiles, tree.parts, tree.combines) == (32, 1, 4, True)
    grouped = AttentionPlan.of(h200, LLAMA3_8B, 24)
    assert (grouped.tile, grouped.num_tiles, grouped.parts, grouped.combines) == (64, 2, 8, False)
    assert AttentionPlan.of(h200, LLAMA3_8B, 4).combines
    # a short cache is not worth parts
    assert AttentionPlan.of(h200, replace(VICUNA_7B, capacity=200), 1).parts == 1
    small = AttentionPlan.of(GPUS[86], VICUNA_7B, 24)
    assert (tree.num_columns, tree.stages) == (128, 3)
    assert (small.num_columns, small.stages) == (64, 3)
    assert AttentionPlan.of(GPUS[86], GEMMA2_9B, 1).stages == 2


BUILDS: dict[str, tuple[int, AttentionLayer, int, dict[str, bool]]] = {
    "80 tree": (80, VICUNA_7B, 24, {}),
    "90 tree": (90, VICUNA_7B, 24, {}),
    "90 groups": (90, LLAMA3_8B, 24, {"has_window": True}),
    "90 row of 256": (90, GEMMA2_9B, 1, {"is_capped": True}),
}
"""Compute capability, layer, rows and features of kernels by name."""
proof = pytest.mark.proof


@cache
def built(name: str, *unaligned: str) -> tuple[AttentionPlan, Compiled]:
    capability, layer, num_rows, features = BUILDS[name]
    plan = AttentionPlan.of(GPUS[capability], layer, num_rows)
    (kernel,) = compiled([request(plan, capability, unaligned, **features)])
    return plan, kernel


@pytest.mark.parametrize(
    "name",
    [name if name == "90 tree" else pytest.param(name, marks=proof) for name in BUILDS],
)
def test_what_kernels_become(name: str) -> None:
    plan, kernel = built(name)
    assert kernel.shared_bytes <= plan.shared_bytes(GPUS[BUILDS[name][0]])
    assert kernel.count("LDGSTS.E.BYPASS.128") == kernel.count("LDGSTS") > 0
    assert kernel.count("HMMA" if name.startswith("80") else "HGMMA") > 0
    assert kernel.stack_bytes == 0, "registers are spilled"


@pytest.mark.parametrize(
    "name",
    [
        name if name == "90 tree" else pytest.param(name, marks=proof)
        for name, (capability, *_) in BUILDS.items()
        if capability == 90
    ],
)
def test_attention_begins_early_and_waits_for_what_it_reads(name: str) -> None:
    """Before the wait it reads positions and the prefix, gives hints, and stores nothing."""
    plan, kernel = built(name)
    assert touched_before_wait(kernel) == ({"positions", "prefix"}, set())
    # what a kernel without the wait, or with a late one, would be found to do
    without = replace(kernel, ptx=kernel.ptx.replace("griddepcontrol.wait;", ""))
    read, written = touched_before_wait(without)
    assert {"qkv", "cache", "visible"} < read
    assert {"cache", "out"} < written
    before, after = kernel.ptx.split("griddepcontrol.wait;")
    assert before.count("griddepcontrol.launch_dependents;") == 1
    assert "griddepcontrol" not in after
    threads, blocks = 32 * NUM_WARPS, 2
    lines = 2 * blocks * plan.num_columns * plan.layer.padded_dim * 2 // 64
    assert before.count("prefetch.global.L2") == lines // threads
    # the machine code keeps this order
    names = re.findall(r"\b(CCTL\.E\.PF2|ACQBULK|LDGSTS|STG|ATOMG)\b", kernel.sass)
    assert set(names[: names.index("ACQBULK")]) == {"CCTL.E.PF2"}
    assert "CCTL.E.PF2" not in names[names.index("ACQBULK") :]


@proof
def test_blocks_of_no_known_place_are_copied_in_small_pieces() -> None:
    _, kernel = built("90 tree", "cache")
    assert kernel.count("LDGSTS.E.BYPASS.128") == 0


@proof
def test_the_last_program_sees_what_others_stored() -> None:
    stored, _, drawn = built("90 tree")[1].ptx.partition("atom.global.gpu.acq_rel.add")
    assert "bar.sync" in stored.rsplit("st.global", 1)[1]
    assert "ld.global.cg" in drawn


@proof
def test_a_second_kernel_needs_no_tickets() -> None:
    assert "atom.global" not in built("90 groups")[1].ptx
    (kernel,) = compiled([combining(AttentionPlan.of(GPUS[90], LLAMA3_8B, 24))])
    assert kernel.stack_bytes == 0
    assert kernel.count("LDG.E.128") > 0
    assert touched_before_wait(kernel) == (set(), set())
