"""Attention of few rows over a long cache: the runtime's, PyTorch's fused one, flex attention.

    python benchmarks/attention.py CHAIN [--device cuda] [--contexts 256 2048] [--rows 1 24]
        [--record FILE]

Each reads the caches of all layers of the target one after the other, as a pass does: they come
from memory. The runtime's rotates the rows and writes them into the cache, too, and reads the
length on the device. The others are given rotated queries and written rows, and are told the length
on the host: what they take in a runtime is more. On a CPU, where passes are one call of native
kernels, this runs with POLYBASIC_KERNELS=eager.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from command import ScriptReport, begin, load, options, positive, run
from measuring import Bandwidth, Case, Spread, all_of, captured, in_turns, measure_bandwidth
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from polybasic.chain.base.errors import UserError
from polybasic.chain.kernels.cuda.graphs import Graphs
from polybasic.chain.kernels.torch.executor import TorchExecutor
from polybasic.chain.kernels.torch.operations import Heads
from polybasic.chain.kernels.torch.rows import device_consecutive_rows
from polybasic.deploy import Chain
from polybasic.deploy.runtime.rounds.cache import KeyValueCache

CONTEXTS = (256, 2048, 8192)
ROWS = (1, 8, 24, 40)

Attend = Callable[[Tensor], Tensor]
"""The cache of a layer, [2K, capacity, H] -> what the rows attend to."""


@dataclass(frozen=True)
class AttentionTime:
    """Of one layer, and the bytes of its cache over the bandwidth."""

    kernel: str
    rows: int
    context: int
    seconds: Spread
    bound_seconds: float


def attention_cases(
    chain: Chain,
    contexts: Sequence[int],
    all_rows: Sequence[int],
    turns: int,
    repeats: int,
    bandwidth: Bandwidth,
) -> Iterator[Case[AttentionTime]]:
    """A case for each context, number of rows and kernel; flex attention, which is compiled for
    each shape, over the last number of rows alone.

    Raises:
        UserError: the target's passes are native calls.
    """
    name, verifier = next(iter(chain.engine.verifiers.items()))
    model, cache = verifier.decoder, verifier.cache
    if not isinstance(model, TorchExecutor):
        raise UserError(
            "attention is a part of native passes",
            f"{name} runs on the executor {model.name!r}",
            "set POLYBASIC_KERNELS=eager",
        )
    graphs = Graphs(cache.block.device, max_graphs=1)

    @torch.inference_mode()
    def measure(kernel: str, context: int, rows: int) -> list[AttentionTime]:
        attend = KERNELS[kernel](model, cache, context, rows)

        def over_all() -> None:
            for layer in cache.layers:
                attend(layer)

        attend_all = captured(graphs, (kernel, context, rows), over_all)
        taken = in_turns({kernel: attend_all}, turns, repeats, graphs.device)[kernel]
        bound = cache.block[0, :, : context + rows].nbytes / bandwidth.bound
        seconds = taken.times(1 / len(cache.layers))
        return [AttentionTime(kernel, rows, context, seconds, bound)]

    for context in contexts:
        for rows in all_rows:
            for kernel in KERNELS if rows == all_rows[-1] else tuple(KERNELS)[:2]:
                what = f"{kernel}, {rows} rows after {context} tokens"
                yield what, partial(measure, kernel, context, rows)


def runtime(model: TorchExecutor, cache: KeyValueCache, context: int, rows: int) -> Attend:
    """The attention of the runtime's passes."""
    heads, rotation = model.heads[0], model.weights.rotary.tables[0]
    prefix = torch.tensor(context, device=model.device)
    num_heads = heads.num_kv_heads * (heads.query_groups + 2)
    qkv = torch.randn(rows, num_heads * heads.head_dim).to(cache.block)
    looking = device_consecutive_rows(prefix, rows)
    span = looking.span_of(model.config.kinds[0])
    return lambda layer: model.operations.attention(qkv, layer, looking, span, heads, rotation)


def sdpa(model: TorchExecutor, cache: KeyValueCache, context: int, rows: int) -> Attend:
    """PyTorch's fused attention with a mask; the queries of a key/value head are folded."""
    heads = model.heads[0]
    K, G, H = heads.num_kv_heads, heads.query_groups, heads.head_dim
    queries = _queries(heads, cache, rows).view(1, K, G * rows, H)
    is_seen = _seen(context, rows, cache.block.device).repeat(G, 1)
    mask = torch.zeros_like(is_seen, dtype=cache.block.dtype).masked_fill_(~is_seen, float("-inf"))

    def attend(layer: Tensor) -> Tensor:
        keys, values = layer[None, :, : context + rows].split(K, 1)
        found = F.scaled_dot_product_attention(queries, keys, values, mask, scale=heads.scale)
        return found.view(1, K * G, rows, H)

    return attend


def flex(model: TorchExecutor, cache: KeyValueCache, context: int, rows: int) -> Attend:
    """Flex attention over the blocks that rows see; compiled on a GPU."""
    heads, device = model.heads[0], model.device
    queries = _queries(heads, cache, rows)
    is_seen = _seen(context, rows, device)

    def sees(batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        return is_seen[row, column]

    blocks = create_block_mask(sees, None, None, rows, context + rows, device=device.type)
    compute: Callable[..., Tensor] = flex_attention
    if device.type == "cuda":
        compute = torch.compile(flex_attention, dynamic=False)
    chosen = {"block_mask": blocks, "scale": heads.scale, "enable_gqa": heads.query_groups > 1}

    def attend(layer: Tensor) -> Tensor:
        keys, values = layer[None, :, : context + rows].split(heads.num_kv_heads, 1)
        return compute(queries, keys, values, **chosen)

    return attend


KERNELS: dict[str, Callable[[TorchExecutor, KeyValueCache, int, int], Attend]] = {
    "runtime": runtime,
    "SDPA": sdpa,
    "flex attention": flex,
}


def _queries(heads: Heads, cache: KeyValueCache, rows: int) -> Tensor:
    """[1, heads, rows, head size], the same at each call."""
    num_heads = heads.num_kv_heads * heads.query_groups
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(1, num_heads, rows, heads.head_dim, generator=generator).to(cache.block)


def _seen(context: int, rows: int, device: torch.device) -> Tensor:
    """Which columns each row sees, bool [rows, context + rows]."""
    return torch.ones(rows, context + rows, dtype=torch.bool, device=device).tril(context)


def report_attention(report: ScriptReport, times: Sequence[AttentionTime]) -> None:
    """A row for each context, number of rows and kernel."""
    cells = [
        [
            timing.kernel,
            str(timing.context),
            str(timing.rows),
            *timing.seconds.times(1e6).cells(1),
            f"{1e6 * timing.bound_seconds:.1f}",
            f"{timing.seconds.median / timing.bound_seconds:.2f}",
        ]
        for timing in times
    ]
    columns = ["kernel", "context", "rows", "min", "median", "max", "bound", "times bound"]
    report.table("Microseconds of a layer's attention", columns, cells)


def main() -> None:
    parser = options(__doc__, "chain", "--device", "--dtype", "--turns", "--repeats")
    parser.add_argument("--contexts", nargs="+", type=positive, default=CONTEXTS, metavar="TOKENS")
    parser.add_argument("--rows", nargs="+", type=positive, default=ROWS)
    arguments = parser.parse_args()
    report = begin(__file__, __doc__, arguments)
    chain = load(arguments, max(arguments.contexts), beyond_declared=True)
    bandwidth = measure_bandwidth(chain.engine.models.target.device)
    report.say(bandwidth.shown())
    turns, repeats = arguments.turns, arguments.repeats
    cases = attention_cases(chain, arguments.contexts, arguments.rows, turns, repeats, bandwidth)
    report_attention(report, all_of(cases))
    report.write(arguments.record)


if __name__ == "__main__":
    run(main)
