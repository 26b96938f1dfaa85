"""Triton kernels of products of few rows; `polybasic.chain.kernels.cuda.products` launches them.

The weight is the operand of the tensor cores' product that is 64 or 128 wide, and the rows are the
one that may be as narrow as 8: out[o, r] = sum of weight[o, i] * x[r, i] over i. So weights are
read once, and few rows waste little.

#   R = rows (tokens of one pass), I = in features, O = out features
#   ROWS, OUTS, INS = what one step of a program reads of them, all powers of two
#   w = words of a group of 4-bit codes: four threads q, INS / 32 blocks b of inputs, of which a
#   word holds pairs p and, in s and h, those 8 and 16 inputs on; see `PackedWeight`
"""

# mypy: allow-untyped-defs

import triton
import triton.language as tl

from polybasic.chain.kernels.cuda.products.unpacking import (
    CONSTANT_STEPS,
    block_codes,
    block_levels,
    block_of,
    halves,
    raised_by,
    unpacked,
)

_PREFETCH = tl.constexpr("prefetch.global.L2 [$1]; mov.b32 $0, 0;")
_PREFETCHED_BYTES = tl.constexpr(64)
_STEPS_AHEAD = tl.constexpr(4)
_WAIT = tl.constexpr("griddepcontrol.launch_dependents; griddepcontrol.wait; mov.b32 $0, 0;")
"""Of PTX's instruction griddepcontrol (PTX ISA, parallel synchronization and communication)."""
_MAX_READ = tl.constexpr(128)
_GELU_FACTOR = tl.constexpr(1.5957691216057308)  # 2 * sqrt(2 / pi)
_GELU_CUBIC = tl.constexpr(0.044715)


@triton.jit
def wait_for_previous():
    """Let the next kernel begin, then wait until all kernels before this one have ended.

    A kernel with IS_EARLY is launched while the one before it still runs, as soon as all programs
    of that one have come to this place or ended. The wait lasts until that one has ended and all
    that it wrote is seen. Since some program of every such kernel waits, none has ended before
    those in front of it; so after its wait a program may read and write whatever it would if
    kernels ran one after another, shared counters and memory that is used again included.

    Before its wait a program writes nothing, and reads only what was written before the last kernel
    that was launched without IS_EARLY. Weights always were. The rows of a pass, and what its caches
    held by then, were too: a pass begins with PyTorch's embedding of its tokens, which waits for
    all that is before and lets nothing begin early.
    """
    tl.inline_asm_elementwise(_WAIT, "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def norm_kernel(
    x_ptr, norm_ptr, out_ptr, in_size, x_stride, eps, INS: tl.constexpr, IS_EARLY: tl.constexpr
):
    """Root-mean-square norm of one row a program; INS >= I."""
    row = tl.program_id(0)
    ins = tl.arange(0, INS)
    weight = tl.load(norm_ptr + ins, ins < in_size, other=0.0).to(tl.float32)
    if IS_EARLY:
        wait_for_previous()
    x = tl.load(x_ptr + row * x_stride + ins, ins < in_size, other=0.0).to(tl.float32)
    normed = x * tl.rsqrt(tl.sum(x * x, 0) / in_size + eps) * weight
    tl.store(out_ptr + row * in_size + ins, normed.to(out_ptr.dtype.element_ty), ins < in_size)


@triton.jit(do_not_specialize=["num_rows", "num_splits"])
def product_kernel(
    x_ptr,
    weight_ptr,
    groups_ptr,
    high_ptr,
    constants_ptr,
    norm_ptr,
    bias_ptr,
    added_ptr,
    out_ptr,
    parts_ptr,
    tickets_ptr,
    num_rows,
    in_size,
    out_size,
    x_stride,
    num_splits,
    eps,
    ROWS: tl.constexpr,
    OUTS: tl.constexpr,
    INS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_BITS: tl.constexpr,
    ZERO: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    IS_EVEN: tl.constexpr,
    IS_NARROW: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_GELU: tl.constexpr,
    IS_ON_GPU: tl.constexpr,
    IS_WIDE: tl.constexpr,
    IS_EARLY: tl.constexpr,
    STAGES: tl.constexpr,
):
    """out = activation of (x, normed, times weight transposed, plus bias), plus added.

    A program computes OUTS rows of the weight (for a gated product, half of them gate and half of
    them up) over one of num_splits parts of the inputs. The program of a tile that finishes last,
    by its ticket, adds the parts in a fixed order, so that the sum does not depend on which one
    that is, and resets the ticket to 0 for the next launch.

    Args:
        x_ptr: [R, I], rows x_stride apart.
        weight_ptr: [O, I] in the dtype of x; or words [I / INS, O, INS / 8], with groups_ptr.
        groups_ptr: int32 [I / INS, O], scales and zeros of `PackedWeight`, or the factors of
            `PackedBlocks`; or None.
        high_ptr, constants_ptr: of `PackedBlocks`, or None.
        norm_ptr: [I] in float32, or int32 [I / 2] of two weights in the dtype of x; or None.
        bias_ptr: [O] or None.
        added_ptr: [R, O] or None; never of a gated product.
        out_ptr: [R, O], of a gated product [R, O / 2].
        parts_ptr: float32 [tiles, num_splits, (OUTS + 1) * ROWS]; None for one split.
        tickets_ptr: int32 [tiles], zeros; None for one split.
        GROUP: inputs that share a scale, of blocks; else INS.
        BLOCK_BITS: of a code in blocks; 0 for other weights.
        ZERO, HAS_OFFSETS: of blocks, see `BlockType`.
        IS_EVEN: I is a multiple of INS; always so for words.
        IS_NARROW: the result has fewer columns than a tile.
        IS_WIDE: the tensor cores read x from shared memory, as Hopper's do.
        IS_EARLY: programs begin before the previous kernel has ended, and wait for it after they
            have requested their first weights; see `wait_for_previous`.
    """
    tile, split = tl.program_id(0), 0
    if IS_SPLIT:
        tile, split = tile // num_splits, tile % num_splits
    num_steps = tl.cdiv(in_size, INS)
    first, last = 0, num_steps
    if IS_SPLIT:
        first, last = split * num_steps // num_splits, (split + 1) * num_steps // num_splits
    WIDTH: tl.constexpr = OUTS // 2 if IS_GATED else OUTS
    num_outs = out_size // 2 if IS_GATED else out_size
    # the last tile starts early enough to be full: outputs of two tiles are equal
    first_out = tl.maximum(tl.minimum(tile * WIDTH, num_outs - WIDTH), 0)
    columns = tl.arange(0, WIDTH)
    if IS_NARROW:
        columns = tl.minimum(columns, num_outs - 1)
    if IS_GATED:  # gate before up
        outs = (tl.arange(0, 2)[:, None] * num_outs + columns[None, :]).reshape(OUTS)
    else:
        outs = columns
    rows = tl.arange(0, ROWS)
    ins = tl.arange(0, INS)
    words = tl.arange(0, INS // 8)
    is_row = rows < num_rows
    # addresses are a shared number plus constant offsets, which saves registers
    x_places = rows[:, None] * x_stride + tl.arange(0, GROUP)[None, :]
    dense_places = outs[:, None] * in_size + ins[None, :]
    word_places = outs[:, None] * (INS // 8) + words[None, :]
    dense_ptr = weight_ptr + first_out.to(tl.int64) * in_size
    if IS_EARLY:
        for ahead in tl.static_range(_STEPS_AHEAD):
            step = tl.maximum(tl.minimum(first + ahead, last - 1), 0)
            if groups_ptr is not None:
                first_row = step * out_size + first_out
                prefetch(weight_ptr + (first_row + outs) * (INS // 8), INS // 8, INS // 8)
            else:
                prefetch(dense_ptr + step * INS + outs * in_size, INS, INS)
        wait_for_previous()
    sums = tl.zeros((OUTS, ROWS), tl.float32)
    squares = tl.zeros((ROWS, GROUP // 8), tl.float32)
    for step in tl.range(first, last, num_stages=STAGES):
        if BLOCK_BITS > 0:
            first_row = step * out_size + first_out
            constants_row = step // CONSTANT_STEPS * out_size + first_out
            packed, high, factors, constants = block_of(
                weight_ptr, groups_ptr, high_ptr, constants_ptr, first_row + outs,
                constants_row + outs, None, BLOCK_BITS, HAS_OFFSETS,
            )  # fmt: skip
            codes = block_codes(
                packed, high, x_ptr.dtype.element_ty, OUTS, ZERO, BLOCK_BITS - 4, GROUP,
                HAS_OFFSETS, IS_ON_GPU, IS_WIDE,
            )  # fmt: skip
            for group in tl.static_range(INS // GROUP):
                x, more = _rows(
                    x_ptr, norm_ptr, step * INS + group * GROUP, x_places, is_row[:, None],
                    in_size, ROWS, GROUP, True,
                )  # fmt: skip
                squares += more
                if not IS_WIDE:
                    x = _in_threads_order(x, ROWS, GROUP)
                scale, offset = block_levels(
                    factors, constants, group, HAS_OFFSETS, constants_ptr is not None
                )
                found = tl.dot(codes[group], x.T)
                if HAS_OFFSETS:  # whose factor is the sum of x, in the layout of the sums
                    ones = tl.full((OUTS, GROUP), 1.0, tl.float32).to(x.dtype)
                    totals = tl.dot(ones, x.T)
                    offset -= scale * raised_by(x.dtype)
                    sums += totals * offset[:, None]
                sums += found * scale[:, None]
        else:
            is_seen = is_row[:, None]
            if not IS_EVEN:
                is_seen = is_seen & (step * INS + ins < in_size)[None, :]
            x, more = _rows(
                x_ptr, norm_ptr, step * INS, x_places, is_seen, in_size, ROWS, INS, IS_EVEN
            )
            squares += more
            if groups_ptr is not None:
                first_row = step * out_size + first_out
                group = tl.load(groups_ptr + first_row + outs)
                packed = tl.load(weight_ptr + first_row * (INS // 8) + word_places)
                codes = unpacked(packed, group & 15, x.dtype, OUTS, INS, IS_ON_GPU)
                if IS_WIDE:
                    codes = codes.permute(0, 2, 5, 4, 1, 3)
                else:
                    codes = codes.permute(0, 2, 5, 1, 4, 3)
                    x = _in_threads_order(x, ROWS, INS)
                scale = (group & -16).to(tl.float32, bitcast=True)
                sums += tl.dot(codes.reshape(OUTS, INS), x.T) * scale[:, None]
            elif IS_EVEN:
                weight = tl.load(dense_ptr + step * INS + dense_places)
                sums = tl.dot(weight, x.T, sums)
            else:
                is_input = step * INS + ins < in_size
                weight = tl.load(
                    dense_ptr + step * INS + dense_places, is_input[None, :], other=0.0
                )
                sums = tl.dot(weight, x.T, sums)
    sums_RO = sums.T
    squares_R = tl.sum(squares, 1)
    is_last = True
    if IS_SPLIT:
        part_size = ROWS * (OUTS + 1)
        parts_ptr += tile * num_splits * part_size
        places_RO = rows[:, None] * OUTS + tl.arange(0, OUTS)[None, :]
        part_at = parts_ptr + split * part_size
        tl.store(part_at + places_RO, sums_RO, is_row[:, None])
        tl.store(part_at + ROWS * OUTS + rows, squares_R, is_row)
        # all threads have stored before the ticket is taken
        tl.debug_barrier()
        ticket = tl.atomic_add(tickets_ptr + tile, 1, sem="acq_rel", scope="gpu")
        is_last = ticket == num_splits - 1
    if is_last:
        if IS_SPLIT:
            tl.store(tickets_ptr + tile, 0)
            sums_RO = tl.zeros((ROWS, OUTS), tl.float32)
            squares_R = tl.zeros((ROWS,), tl.float32)
            # as many parts at once as fit into registers
            for base in tl.range(0, num_splits, _MAX_READ // ROWS, num_stages=1):
                for ahead in tl.static_range(_MAX_READ // ROWS):
                    part_at = parts_ptr + (base + ahead) * part_size
                    is_read = is_row & (base + ahead < num_splits)
                    sums_RO += tl.load(
                        part_at + places_RO, is_read[:, None], other=0.0, cache_modifier=".cg"
                    )
                    squares_R += tl.load(
                        part_at + ROWS * OUTS + rows, is_read, other=0.0, cache_modifier=".cg"
                    )
        if norm_ptr is not None:
            sums_RO *= tl.rsqrt(squares_R / in_size + eps)[:, None]
        if bias_ptr is not None:
            sums_RO += tl.load(bias_ptr + first_out + outs).to(tl.float32)[None, :]
        out = sums_RO
        if IS_GATED:
            gate, up = sums_RO.reshape(ROWS, 2, WIDTH).permute(0, 2, 1).split()
            out = _activated(gate, IS_GELU) * up
        places = first_out + rows[:, None] * num_outs + columns[None, :]
        is_stored = is_row[:, None]
        if added_ptr is not None:
            out += tl.load(added_ptr + places, is_stored, other=0.0).to(tl.float32)
        tl.store(out_ptr + places, out.to(out_ptr.dtype.element_ty), is_stored)


@triton.jit
def _rows(
    x_ptr,
    norm_ptr,
    first,
    places,
    is_seen,
    in_size,
    ROWS: tl.constexpr,
    INS: tl.constexpr,
    IS_EVEN: tl.constexpr,
):
    """Rows of x at some inputs, times the norm's weights, and sums of squares [ROWS, INS / 8]."""
    x = tl.load(x_ptr + first + places, is_seen, other=0.0)
    squares = tl.zeros((ROWS, INS // 8), tl.float32)
    if norm_ptr is not None:
        wide = x.to(tl.float32)
        squares = tl.sum((wide * wide).reshape(ROWS, INS // 8, 8), 2)
        norm = _norm_weights(norm_ptr, first, in_size, x.dtype, INS, IS_EVEN)
        x = (wide * norm[None, :]).to(x.dtype)
    return x, squares


@triton.jit
def _in_threads_order(x, ROWS: tl.constexpr, INS: tl.constexpr):
    """Sixteen inputs in the order that codes have where a thread's part of them is adjacent."""
    return x.reshape(ROWS, INS // 16, 2, 4, 2).permute(0, 1, 3, 2, 4).reshape(ROWS, INS)


@triton.jit
def prefetch(rows_at, NUMBERS: tl.constexpr, POWER: tl.constexpr):
    """Prefetch NUMBERS numbers from each address on into the L2 cache; POWER is not below that."""
    BYTES: tl.constexpr = rows_at.dtype.element_ty.primitive_bitwidth // 8
    COPIED: tl.constexpr = min(POWER, _PREFETCHED_BYTES // BYTES)
    places = tl.arange(0, POWER // COPIED) * COPIED
    if NUMBERS < POWER:
        places = tl.minimum(places, NUMBERS - 1)
    copied_at = rows_at[:, None] + places[None, :]
    tl.inline_asm_elementwise(
        _PREFETCH, "=r,l", [copied_at.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _norm_weights(
    norm_ptr, first, in_size, dtype: tl.constexpr, INS: tl.constexpr, IS_EVEN: tl.constexpr
):
    """float32 [INS]; those of 16 bits are read in pairs, as asynchronous copies need 4 bytes."""
    if norm_ptr.dtype.element_ty == tl.float32:
        places = first + tl.arange(0, INS)
        is_input = places < in_size
    else:
        places = first // 2 + tl.arange(0, INS // 2)
        is_input = places < in_size // 2
    if IS_EVEN:
        weights = tl.load(norm_ptr + places)
    else:
        weights = tl.load(norm_ptr + places, is_input, other=0)
    if norm_ptr.dtype.element_ty != tl.float32:
        weights = halves(weights, dtype).reshape(INS)
    return weights.to(tl.float32)


@triton.jit
def _activated(gate, IS_GELU: tl.constexpr):
    """SiLU, or GELU by its tanh: 1 + tanh(z) = 2 sigmoid(2 z)."""
    inner = gate
    if IS_GELU:
        inner = _GELU_FACTOR * (gate + _GELU_CUBIC * gate * gate * gate)
    return gate * tl.sigmoid(inner)
