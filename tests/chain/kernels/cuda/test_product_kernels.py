"""What the compiler makes of product kernels for GPUs, and the instructions that it is given."""

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import triton.language as tl

from polybasic.chain.formats.checkpoints.block_types import BLOCK_TYPES
from polybasic.chain.kernels.cuda.products import kernels, unpacking
from polybasic.chain.kernels.cuda.products.launch import Product, Tiling
from polybasic.chain.kernels.cuda.products.options import BLOCK_SHAPES, DENSE_SHAPES, PACKED_SHAPES
from tests.chain.kernels.cuda.compiling import (
    CAPABILITIES,
    MOST_SHARED_BYTES,
    Compiled,
    Request,
    compiled,
)
from tests.chain.kernels.cuda.early_access import touched_before_wait
from tests.chain.kernels.cuda.product_cases import ABSENT, DTYPES, random_product, shapes_of

TYPES = {
    torch.int16: "*i16",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
}
OPTIONS = ("num_warps", "num_stages", "maxnreg", "launch_pdl")
REGISTERS, MOST_THREAD_REGISTERS = 1 << 16, 255
"""Of a multiprocessor, and of a thread."""
SHARED_BYTES = 227 * 1024
"""Of one of Hopper's multiprocessors, for all programs."""


class Assembly:
    """Runs the few instructions that codes are unpacked by."""

    def __init__(self, source: str, *inputs: int) -> None:
        self.registers = {f"${place}": value for place, value in enumerate(inputs, 4)}
        for line in source.splitlines():
            if match := re.fullmatch(r"(\w+)\.([\w.]+) (.+);", line):
                self._run(match[1], match[2], [name.strip() for name in match[3].split(",")])

    def _run(self, operation: str, kind: str, names: list[str]) -> None:
        target, *values = names[0], *(self._value(name) for name in names[1:])
        if operation == "mov":
            (result,) = values
        elif operation == "shr":
            result = values[0] >> values[1]
        elif operation == "lop3":
            result = sum(
                (values[3] >> (4 * (values[0] >> bit & 1) + 2 * (values[1] >> bit & 1)
                 + (values[2] >> bit & 1)) & 1) << bit
                for bit in range(32)
            )  # fmt: skip
        elif operation == "fma":
            dtype = {"rn.bf16x2": torch.bfloat16, "rn.f16x2": torch.float16}[kind]
            first, second, third = (unpacked(value, dtype) for value in values)
            halves = (first.double() * second.double() + third.double()).to(dtype)
            result = int(halves.view(torch.int16).numpy().view(np.uint32)[0])
        else:
            raise AssertionError(operation)
        self.registers[target] = result

    def _value(self, name: str) -> int:
        return self.registers[name] if name in self.registers else int(name, 0)


def unpacked(word: int, dtype: torch.dtype) -> Tensor:
    """The two values of 16 bits of a word."""
    return torch.from_numpy(np.array([word], np.uint32).view(np.int16).copy()).view(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_codes_are_unpacked_exactly(dtype: torch.dtype) -> None:
    is_bf16 = dtype == torch.bfloat16
    source = (unpacking._UNPACK_BF16 if is_bf16 else unpacking._UNPACK_FP16).value
    magic = (unpacking._BF16_MAGIC if is_bf16 else unpacking._FP16_MAGIC).value
    for zero in range(16):
        offset = ((zero | magic) * 0x00010001 ^ unpacking._SIGNS.value) & 0xFFFFFFFF
        for code in range(16):
            codes = [(code + 3 * place) % 16 for place in range(8)]
            word = sum(each << (4 * place) for place, each in enumerate(codes))
            run = Assembly(source, word, offset)
            for pair in range(4):
                found = unpacked(run.registers[f"${pair}"], dtype).tolist()
                assert found == [codes[pair] - zero, codes[4 + pair] - zero]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_high_bits_are_added_exactly(dtype: torch.dtype) -> None:
    is_bf16 = dtype == torch.bfloat16
    source = (unpacking._ADD_HIGH_BF16 if is_bf16 else unpacking._ADD_HIGH_FP16).value
    magic = (unpacking._BF16_MAGIC if is_bf16 else unpacking._FP16_MAGIC).value
    sixteen_times = 4 << (7 if is_bf16 else 10)
    for zero in range(9):
        offset = ((zero | magic + sixteen_times) * 0x00010001 ^ unpacking._SIGNS.value) & 0xFFFFFFFF
        for low in (-8, 0, 15):
            pair = torch.full((2,), low, dtype=dtype).view(torch.int32).item() & 0xFFFFFFFF
            codes = [(low + 5 * place) % 16 for place in range(8)]
            word = sum(each << (4 * place) for place, each in enumerate(codes))
            run = Assembly(source, *(pair,) * 4, word, offset)
            for place in range(4):
                found = unpacked(run.registers[f"${place}"], dtype).tolist()
                assert found == [low + 16 * (codes[other] - zero) for other in (place, 4 + place)]


# What is not marked as proof compiles one kernel, so that each run of the tests has one.
proof = pytest.mark.proof


def request(product: Product, tiling: Tiling, capability: int) -> Request:
    """A product's kernel for a GPU."""
    _, arguments = product.arguments(tiling)
    arguments |= {"IS_ON_GPU": True, "IS_WIDE": capability == 90}
    options = {name: arguments.pop(name) for name in OPTIONS if name in arguments}
    kernel = kernels.product_kernel
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    for name, value in arguments.items():
        if value is None or kernel.fn.__annotations__.get(name) is tl.constexpr:
            constants[name] = value
        elif isinstance(value, Tensor):
            signature[name] = TYPES[value.dtype]
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
    return Request(
        kernels.__name__,
        "product_kernel",
        signature,
        constants,
        ("num_rows", "num_splits"),
        capability,
        options,
    )


def requested(
    packing: int | str,
    num_rows: int,
    tiling: Tiling,
    capability: int = 90,
    dtype: torch.dtype = torch.bfloat16,
    **parts: Any,
) -> Request:
    product, _ = random_product(dtype, packing, 512, 256, num_rows, **parts)
    ins = packing if isinstance(packing, int) and packing else tiling.ins
    return request(product, replace(tiling, ins=ins), capability)


def streams_codes(found: Compiled, tiling: Tiling) -> None:
    """Codes come in copies of 16 bytes that run ahead, and go from a thread's registers on."""
    loop = found.loop()
    threads = 32 * tiling.warps
    codes = tiling.outs * 128 // threads
    assert loop.count("LDGSTS.E.BYPASS.128") >= tiling.outs * 64 // 16 // threads
    assert loop.count("LDG.") == 0
    assert loop.count("LDS.128") >= codes // 32
    assert loop.count("ST") == 0, "weights are written nowhere"
    # shifted, masked and joined with a constant: 7 instructions for 8 codes; 4 take the zero off
    assert loop.count("LOP3") + loop.count("SHF.R") < codes * 1.05 + 16
    assert loop.count("HADD2") + loop.count("HFMA2") == codes // 2


@pytest.mark.parametrize(
    "rows",
    [rows if rows == 16 else pytest.param(rows, marks=proof) for rows in PACKED_SHAPES],
)
def test_codes_stream_into_hoppers_tensor_cores(rows: int) -> None:
    """The first shape of each number of rows."""
    tiling = PACKED_SHAPES[rows][0].tiling
    (found,) = compiled([requested(128, rows, tiling)])
    streams_codes(found, tiling)
    assert found.stack_bytes == 0
    # 16 inputs at a time, 64 rows of the weight for each four warps
    assert found.loop().count(f"HGMMA.64x{rows}x16") == 8 * tiling.outs // 16 // tiling.warps
    assert "ttg.convert_layout" not in found.ttgir.partition("scf.for")[2].partition("scf.yield")[0]


@proof
def test_blocks_stream_into_hoppers_tensor_cores() -> None:
    """Of all types: nothing waits for memory, and no code goes through shared memory."""
    tiling = BLOCK_SHAPES[16][0].tiling
    threads = 32 * tiling.warps
    for found in compiled([requested(name, 16, tiling) for name in BLOCK_TYPES]):
        loop = found.loop()
        assert found.stack_bytes == 0
        assert loop.count("LDG.") == loop.count("ST") == loop.count("SHFL") == 0
        assert loop.count("LDGSTS.E.BYPASS.128") >= tiling.outs * 32 // 16 // threads
        body = found.ttgir.partition("scf.for")[2].partition("scf.yield")[0]
        assert "ttg.convert_layout" not in body


@proof
def test_a_norm_leaves_codes_streaming() -> None:
    tiling = PACKED_SHAPES[16][0].tiling
    (found,) = compiled([requested(128, 16, tiling, has_norm=True, activation="silu")])
    loop = found.loop()
    assert loop.count("LDG.") == 0
    assert loop.count("HADD2") == tiling.outs * 128 // 2 // 32 // tiling.warps
    # the rows, times the norm's weights: 4 KB
    assert loop.count("STS.128") == 16 * 128 * 2 // 16 // 32 // tiling.warps
    assert loop.count("STS") == loop.count("STS.128")


@proof
def test_codes_stream_into_amperes_tensor_cores() -> None:
    tiling = PACKED_SHAPES[16][0].tiling
    (found,) = compiled([requested(128, 16, tiling, 80)])
    streams_codes(found, tiling)
    assert found.loop().count("HMMA.16816") == 2 * 8 * tiling.outs // 16 // tiling.warps


@proof
def test_an_order_of_inputs_that_does_not_fit_is_noticed() -> None:
    """With Hopper's order of inputs, codes for Ampere pass through shared memory."""
    tiling = PACKED_SHAPES[16][0].tiling
    wrong = requested(128, 16, tiling, 80)
    wrong = replace(wrong, constants={**wrong.constants, "IS_WIDE": True})
    (found,) = compiled([wrong])
    with pytest.raises(AssertionError, match="weights are written nowhere"):
        streams_codes(found, tiling)


@proof
def test_dense_weights_stream_too() -> None:
    tiling = DENSE_SHAPES[16][0].tiling
    requests = [requested(ABSENT, 16, tiling), requested(ABSENT, 16, tiling, has_norm=True)]
    plain, normed = (found.loop() for found in compiled(requests))
    for loop in (plain, normed):
        assert loop.count("LDG.") == 0
        assert loop.count("LDGSTS.E.BYPASS.128") >= tiling.outs * tiling.ins * 2 // 16 // 128
        assert loop.count("HGMMA.64x16x16") == tiling.outs // 64 * tiling.ins // 16
    assert plain.count("STS") == 0
    assert normed.count("STS") > 0  # the rows, times the norm's weights


@proof
def test_results_of_parts_are_published_in_order() -> None:
    tiling = replace(PACKED_SHAPES[16][0].tiling, splits=4)
    (found,) = compiled([requested(128, 16, tiling, has_added=True)])
    names = re.findall(
        r"\b(STG\.E\.128|MEMBAR\.ALL\.GPU|ATOMG|CCTL\.IVALL|LDG\.E\.128)\b", found.sass
    )
    order = list(dict.fromkeys(names))
    assert order[:5] == ["STG.E.128", "MEMBAR.ALL.GPU", "ATOMG", "CCTL.IVALL", "LDG.E.128"]


@proof
@pytest.mark.parametrize("group_size", [ABSENT, 128])
def test_what_begins_early_waits_before_it_reads_or_writes(group_size: int) -> None:
    shapes = PACKED_SHAPES if group_size else DENSE_SHAPES
    tiling = replace(shapes[16][0].tiling, splits=2, is_early=True)
    (found,) = compiled([requested(group_size, 16, tiling, has_norm=True)])
    names = re.findall(r"\b(CCTL\.E\.PF2|ACQBULK|LDG|LDGSTS|STG|ATOMG)\b", found.sass)
    waits = names.index("ACQBULK")
    # the only thing before is a hint to the cache: 64 bytes each, of the first 4 steps
    step_bytes = tiling.outs * (64 if group_size else 2 * tiling.ins)
    assert names[:waits] == ["CCTL.E.PF2"] * (4 * step_bytes // 64 // 128)
    assert names.count("ACQBULK") == 1
    assert touched_before_wait(found) == (set(), set())


@proof
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_the_norm_reads_a_row_at_once(capability: int) -> None:
    signature = dict.fromkeys(("x_ptr", "norm_ptr", "out_ptr"), "*bf16")
    signature |= {"in_size": "i32", "x_stride": "i32", "eps": "fp32"}
    is_early = capability == 90
    constants, options = {"INS": 4096, "IS_EARLY": is_early}, {"num_warps": 8}
    wide = Request(kernels.__name__, "norm_kernel", signature, constants, (), capability, options)
    mixed = replace(
        wide,
        signature={**signature, "norm_ptr": "*fp32"},
        constants={**constants, "INS": 16384},
    )
    found, large = compiled([wide, mixed])
    if is_early:
        # its weights do not wait for the rows
        assert touched_before_wait(found) == touched_before_wait(large) == ({"norm_ptr"}, set())
        weights, rows = found.sass.split("ACQBULK")
        assert [part.count("LDG.E.128") for part in (weights, rows)] == [2, 2]
        assert "STG" not in weights
    assert found.count("LDG.E.128") == 2 * 4096 * 2 // 16 // 256
    assert found.stack_bytes == large.stack_bytes == 0


@proof
def test_weights_are_unpacked_without_spills() -> None:
    requests = [
        Request(
            unpacking.__name__,
            "dequantize_kernel",
            {"words_ptr": "*i32", "groups_ptr": "*i32", "out_ptr": kind,
             "out_size": "i32", "in_size": "i32"},
            {"OUTS": 64, "INS": group_size, "IS_ON_GPU": True},
            options={"num_warps": 4},
        )
        for kind in ("*bf16", "*fp16")
        for group_size in (64, 128)
    ]  # fmt: skip
    for found in compiled(requests):
        assert found.stack_bytes == 0
        assert found.registers <= 128
        assert found.count("STG.E.128") == found.count("STG") > 0
        assert found.count("LDG.E.128") > 0
        # to the nearest
        assert re.search(r"cvt\.rn\.b?f16(x2)?\.f32", found.ptx)


PACKINGS = [
    (packing, rows)
    for packing in (128, 32, ABSENT, "Q5_K", "Q6_K", "Q8_0")
    for rows in shapes_of(packing)
]


@proof
@pytest.mark.parametrize(("packing", "rows"), PACKINGS)
def test_every_shape_fits_a_multiprocessor(packing: int | str, rows: int) -> None:
    """Alone and with what takes most registers and shared memory, whole and in parts."""
    shapes = shapes_of(packing)[rows]
    requests = []
    for shape in shapes:
        tiling, split = shape.tiling, replace(shape.tiling, splits=8)
        requests += [
            requested(packing, rows, tiling, has_added=True),
            requested(packing, rows, split, has_norm=True, activation="silu"),
            requested(packing, rows, tiling, 80, dtype=torch.float16, has_norm=True),
        ]
    found = iter(compiled(requests))
    for shape, plain, gated, on_ampere in zip(shapes, found, found, found, strict=True):
        for each in (plain, gated):
            # some pointers may wait in memory while parts are added up; accumulators may not
            assert each.stack_bytes <= (32 if rows <= 32 else 160)
            assert each.shared_bytes <= SHARED_BYTES
        threads = 32 * shape.tiling.warps
        assert shape.resident * plain.shared_bytes <= SHARED_BYTES
        assert shape.resident * threads * plain.registers <= REGISTERS
        assert plain.registers <= MOST_THREAD_REGISTERS
        assert on_ampere.shared_bytes <= MOST_SHARED_BYTES[80]
