"""Kernels of `polybasic.chain.kernels.cuda.attention`, which says how they divide the work.

Scores are [columns, rows]: the many columns keep the matrix units busy however few rows there
are.

#   R = rows (tokens of one pass), P = provisional rows of the cache, those of the pass included
#   K = key/value heads, G = query heads that read one of them
#   H = head size, HP = the next power of 2
#   M = queries (of R * G) of one program, N = columns (rows of the cache) read at once
"""
# mypy: allow-untyped-defs

import triton
import triton.language as tl

from polybasic.chain.kernels.cuda.products.kernels import prefetch, wait_for_previous

_BLOCKS_AHEAD = tl.constexpr(2)
"""Blocks of columns that are requested before the wait."""


@triton.jit
def _read(heads, cos, sin, position, num_positions, is_row, H: tl.constexpr, HP: tl.constexpr):
    """Inputs for rotating heads [rows, HP]: heads, the same with halves swapped, cosines, sines."""
    head = tl.arange(0, HP)
    mask = is_row[:, None] & (head < H)[None, :]
    x = tl.load(heads[:, None] + head[None, :], mask=mask, other=0.0)
    rolled = tl.load(heads[:, None] + ((head + H // 2) % H)[None, :], mask=mask, other=0.0)
    place = tl.minimum(tl.maximum(position, 0), num_positions - 1).to(tl.int64)
    turn = place[:, None] * H + head[None, :]
    cos_rows = tl.load(cos + turn, mask=mask, other=0.0)
    sin_rows = tl.load(sin + turn, mask=mask, other=0.0)
    return x, rolled, cos_rows, sin_rows


@triton.jit
def _rotated(x, rolled, cos, sin, norm, eps, H: tl.constexpr, HP: tl.constexpr):
    """Heads in float32, normed if there is a norm, and rotated by their positions."""
    x, rolled = x.to(tl.float32), rolled.to(tl.float32)
    if norm is not None:
        head = tl.arange(0, HP)
        weight = tl.load(norm + head, mask=head < H, other=0.0).to(tl.float32)
        exchanged = tl.load(norm + (head + H // 2) % H, mask=head < H, other=0.0).to(tl.float32)
        factor = tl.rsqrt(tl.sum(x * x, 1) / H + eps)[:, None]
        x = x * factor * weight[None, :]
        rolled = rolled * factor * exchanged[None, :]
    return x * cos.to(tl.float32) + rolled * sin.to(tl.float32)


@triton.jit
def _fold(keys, values, queries, seen, most, total, sums, scale, softcap, IS_CAPPED: tl.constexpr):
    """Add the columns of one block [N, H] to the running softmax of the queries [H, M].

    most, total: [M], largest score as an exponent of 2, and sum of weights; sums: [H, M] of
    values.
    """
    scores = tl.dot(keys, queries, input_precision="ieee") * scale
    if IS_CAPPED:
        # tanh(s / c) * c by powers of 2; softcap holds the factor
        scores = softcap - 2 * softcap / (tl.exp2(scores) + 1)
    scores = tl.where(seen, scores, float("-inf"))
    new_most = tl.maximum(most, tl.max(scores, 0))
    base = tl.where(new_most == float("-inf"), 0.0, new_most)
    weights = tl.exp2(scores - base[None, :])
    kept = tl.exp2(most - base)
    total = total * kept + tl.sum(weights, 0)
    weights = weights.to(values.dtype)
    sums = tl.dot(values, weights, sums * kept[None, :], input_precision="ieee")
    return new_most, total, sums


@triton.jit
def _combined(
    found, num_parts, inside, H: tl.constexpr, HP: tl.constexpr, M: tl.constexpr,
    POWER: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Combine the parts of one unit into rows [M, HP], reading AHEAD of them at once."""
    PART: tl.constexpr = M * (H + 2)
    query = tl.arange(0, M)
    numbers = tl.arange(0, POWER)
    stats = found + M * H + numbers[:, None] * PART + query[None, :]
    is_part = (numbers < num_parts)[:, None]
    # Other programs wrote these, so the L1 cache is bypassed.
    most = tl.load(stats, mask=is_part, other=float("-inf"), cache_modifier=".cg")
    totals = tl.load(stats + M, mask=is_part, other=0.0, cache_modifier=".cg")
    peak = tl.max(most, 0)
    peak = tl.where(peak == float("-inf"), 0.0, peak)
    total = tl.sum(totals * tl.exp2(most - peak[None, :]), 0)
    total = tl.where(total > 0, total, 1.0)
    inner = query[:, None] * H + tl.arange(0, HP)[None, :]
    rows = tl.zeros([M, HP], tl.float32)
    for base in tl.range(0, num_parts, AHEAD, num_stages=1):
        for ahead in tl.static_range(AHEAD):
            part = base + ahead
            start = found + part * PART
            is_one = part < num_parts
            own = tl.load(start + M * H + query, mask=is_one, other=0.0, cache_modifier=".cg")
            weight = tl.where(is_one, tl.exp2(own - peak) / total, 0.0)
            sums = tl.load(start + inner, mask=inside & is_one, other=0.0, cache_modifier=".cg")
            rows += weight[:, None] * sums
    return rows


@triton.jit
def combine(
    parts, num_active, out, K: tl.constexpr, G: tl.constexpr, H: tl.constexpr, HP: tl.constexpr,
    M: tl.constexpr, PARTS: tl.constexpr, POWER: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    """One row of one query head, from the parts of its cache. Grid: (R * G, K)."""
    if IS_EARLY:
        wait_for_previous()
    query, kv_head = tl.program_id(0), tl.program_id(1)
    unit = query // M * K + kv_head
    num_parts = tl.load(num_active + unit)
    if num_parts > 1:
        PART: tl.constexpr = M * (H + 2)
        head = tl.arange(0, HP)
        numbers = tl.arange(0, POWER)
        is_part = numbers < num_parts
        found = parts + unit.to(tl.int64) * (PARTS * PART) + numbers * PART
        stats = found + M * H + query % M
        most = tl.load(stats, mask=is_part, other=float("-inf"))
        totals = tl.load(stats + M, mask=is_part, other=0.0)
        peak = tl.max(most, 0)
        weights = tl.exp2(most - tl.where(peak == float("-inf"), 0.0, peak))
        total = tl.sum(totals * weights, 0)
        mask = is_part[:, None] & (head < H)[None, :]
        sums = tl.load(found[:, None] + (query % M) * H + head[None, :], mask=mask, other=0.0)
        attended = tl.sum(sums * weights[:, None], 0) / tl.where(total > 0, total, 1.0)
        place = query // G * (K * G * H) + (kv_head * G + query % G) * H + head
        tl.store(out + place, attended.to(out.dtype.element_ty), mask=head < H)


@triton.jit(
    do_not_specialize=[
        "positions", "visible", "prefix", "first_rows", "counts", "num_rows", "first", "capacity",
        "num_positions", "num_tiles", "position_stride", "visible_stride", "visible_step",
        "tokens", "sinks",
    ]
)  # fmt: skip
def attend(
    qkv, cache, out, parts, num_active, tickets, cos, sin, query_norm, key_norm,
    positions, visible, prefix, first_rows, counts, num_rows, first, capacity, num_positions,
    num_tiles, position_stride, visible_stride, visible_step, tokens, sinks,
    scale, softcap, query_eps, key_eps,
    K: tl.constexpr, G: tl.constexpr, H: tl.constexpr, HP: tl.constexpr,
    M: tl.constexpr, PARTS: tl.constexpr, POWER: tl.constexpr, N: tl.constexpr,
    NEW: tl.constexpr, CHUNKS: tl.constexpr, GRAIN: tl.constexpr, LEAST: tl.constexpr,
    STAGES: tl.constexpr, COMBINES: tl.constexpr, AHEAD: tl.constexpr,
    HAS_WINDOW: tl.constexpr, IS_CAPPED: tl.constexpr, IS_JOINED: tl.constexpr,
    IS_EARLY: tl.constexpr,
):  # fmt: skip
    """One part of the cache of one key/value head, for up to M of its R * G queries.

    Grid: (K * tiles of queries, PARTS); with IS_JOINED (S * K * tiles, PARTS) for S sequences, of
    which `cache` holds the addresses of their caches, `prefix` their committed rows, and
    `first_rows` and `counts` which of the pass's rows are theirs: none of one that is absent.
    `scale` turns products into powers of 2, or with
    IS_CAPPED into twice what tanh takes.

    With IS_EARLY programs begin while the product that computes qkv ends: before their wait they
    read positions and prefix and request committed rows of the cache, as `wait_for_previous`
    allows, and after it all else: qkv, provisional rows, which an earlier level of a draft may have
    written, and what is visible. Programs without a part end at once; each head's first one waits.
    """
    unit, part = tl.program_id(0), tl.program_id(1)
    tile, kv_head = unit // K % num_tiles, unit % K
    WIDTH: tl.constexpr = K * (G + 2) * H
    if IS_JOINED:
        sequence = unit // (K * num_tiles)
        address = tl.load(cache + sequence).to(tl.pointer_type(qkv.dtype.element_ty))
        cache = tl.multiple_of(address, 16)
        num_rows = tl.load(counts + sequence).to(tl.int32)
        first_row = tl.load(first_rows + sequence).to(tl.int32)
        prefix += sequence
        qkv += first_row * WIDTH
        out += first_row * (K * G * H)
        positions += first_row * position_stride
        visible += first_row * visible_stride
    PART: tl.constexpr = M * (H + 2)

    query = tile * M + tl.arange(0, M)
    is_query = query < num_rows * G
    row = tl.where(is_query, query // G, 0)
    position = tl.load(positions + row * position_stride).to(tl.int32)
    num_committed = tl.minimum(tl.load(prefix).to(tl.int32), capacity)

    # what is read of the prefix: the leading columns, and those from the window on
    num_columns, num_leading, num_skipped = num_committed, 0, 0
    if HAS_WINDOW:
        # no row is before the end of the prefix
        num_leading = tl.minimum(sinks, num_committed)
        from_window = tl.minimum(tl.maximum(num_committed - tokens + 1, num_leading), num_committed)
        num_skipped = from_window - num_leading
        num_columns -= num_skipped
    num_provisional = first + num_rows
    provisional_cost = tl.cdiv(num_provisional, N) * N
    num_counted = num_columns + provisional_cost
    per_part = tl.maximum(tl.cdiv(tl.cdiv(num_counted, PARTS), GRAIN) * GRAIN, LEAST)
    num_parts = tl.cdiv(num_counted, per_part)
    if IS_JOINED:
        num_parts = tl.where(num_rows > 0, num_parts, 0)

    if part < num_parts:
        begin = tl.maximum(part * per_part - provisional_cost, 0)
        end = tl.minimum(tl.maximum((part + 1) * per_part - provisional_cost, 0), num_columns)
        head = tl.arange(0, HP)
        is_head = head < H
        plane = capacity.to(tl.int64) * H
        key_rows = cache + kv_head * plane
        value_rows = cache + (K + kv_head) * plane
        is_first_part = part == 0

        if IS_EARLY:
            for ahead in tl.static_range(_BLOCKS_AHEAD):
                wanted = tl.minimum(begin + ahead * N + tl.arange(0, N), end - 1)
                if HAS_WINDOW:
                    wanted += tl.where(wanted >= num_leading, num_skipped, 0)
                wanted = tl.maximum(wanted, 0) * H
                prefetch(key_rows + wanted, H, HP)
                prefetch(value_rows + wanted, H, HP)
            wait_for_previous()

        # Loads come before stores, so that one wait serves them all.
        heads = qkv + row * WIDTH + (kv_head * G + query % G) * H
        x, rolled, cos_rows, sin_rows = _read(
            heads, cos, sin, position, num_positions, is_query, H, HP
        )
        # All tiles of a head write the same values, and each reads only what it wrote itself.
        for chunk in tl.static_range(CHUNKS):
            new_row = chunk * NEW + tl.arange(0, NEW)
            written = num_committed + first + new_row
            is_new = is_first_part & (new_row < num_rows) & (written < capacity)
            new_heads = qkv + new_row * WIDTH + (K * G + kv_head) * H
            place = tl.load(positions + new_row * position_stride, mask=is_new, other=0)
            new_x, new_rolled, new_cos, new_sin = _read(
                new_heads, cos, sin, place, num_positions, is_new, H, HP
            )
            inside_new = is_new[:, None] & is_head[None, :]
            new_values = tl.load(
                new_heads[:, None] + K * H + head[None, :], mask=inside_new, other=0.0
            )
            new_keys = _rotated(new_x, new_rolled, new_cos, new_sin, key_norm, key_eps, H, HP)
            target = written[:, None] * H + head[None, :]
            tl.store(key_rows + target, new_keys.to(cache.dtype.element_ty), mask=inside_new)
            tl.store(value_rows + target, new_values, mask=inside_new)
        queries = _rotated(x, rolled, cos_rows, sin_rows, query_norm, query_eps, H, HP)
        queries = tl.trans(queries.to(cache.dtype.element_ty))

        most = tl.full([M], float("-inf"), tl.float32)
        total = tl.zeros([M], tl.float32)
        sums = tl.zeros([HP, M], tl.float32)
        for start in tl.range(begin, end, N, num_stages=STAGES):
            column = start + tl.arange(0, N)
            is_inside = column < end
            if HAS_WINDOW:
                column += tl.where(column >= num_leading, num_skipped, 0)
            mask = is_inside[:, None] & is_head[None, :]
            inner = column[:, None] * H + head[None, :]
            keys = tl.load(key_rows + inner, mask=mask, other=0.0)
            values = tl.load(value_rows + tl.trans(inner), mask=tl.trans(mask), other=0.0)
            seen = is_inside[:, None]
            if HAS_WINDOW:
                is_latest = column[:, None] > (position - tokens)[None, :]
                seen = seen & (is_latest | (column < sinks)[:, None])
            most, total, sums = _fold(
                keys, values, queries, seen, most, total, sums, scale, softcap, IS_CAPPED
            )

        tl.debug_barrier()  # the new rows are in the cache
        for start in tl.range(0, tl.where(is_first_part, num_provisional, 0), N, num_stages=1):
            column = start + tl.arange(0, N)
            is_column = (column < num_provisional) & (num_committed + column < capacity)
            mask = is_column[:, None] & is_head[None, :]
            inner = (num_committed + column)[:, None] * H + head[None, :]
            keys = tl.load(key_rows + inner, mask=mask, other=0.0)
            values = tl.load(value_rows + tl.trans(inner), mask=tl.trans(mask), other=0.0)
            seen = tl.load(
                visible + row[None, :] * visible_stride + column[:, None] * visible_step,
                mask=is_column[:, None] & is_query[None, :],
                other=0,
            )
            most, total, sums = _fold(
                keys, values, queries, seen != 0, most, total, sums, scale, softcap, IS_CAPPED
            )

        inside = is_query[:, None] & is_head[None, :]
        attended = row * (K * G * H) + (kv_head * G + query % G) * H
        attended = out + attended[:, None] + head[None, :]
        kind = out.dtype.element_ty
        if num_parts == 1:
            rows = tl.trans(sums / tl.where(total > 0, total, 1.0)[None, :])
            tl.store(attended, rows.to(kind), mask=inside)
        else:
            of_unit = parts + unit.to(tl.int64) * (PARTS * PART)
            own = of_unit + part * PART
            spot = tl.arange(0, M)
            tl.store(own + spot[:, None] * H + head[None, :], tl.trans(sums), mask=inside)
            tl.store(own + M * H + spot, most)
            tl.store(own + M * H + M + spot, total)
            if COMBINES:
                tl.debug_barrier()  # all threads have stored before one takes the ticket
                ticket = tl.atomic_add(tickets + unit, 1, sem="acq_rel")
                if ticket == num_parts - 1:
                    tl.store(tickets + unit, 0)
                    rows = _combined(of_unit, num_parts, inside, H, HP, M, POWER, AHEAD)
                    tl.store(attended, rows.to(kind), mask=inside)
        if not COMBINES and is_first_part:
            tl.store(num_active + unit, num_parts)
