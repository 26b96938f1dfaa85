"""The estimate of passes on a GPU, and what early launches take for granted of a pass's order."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from polybasic.chain.formats.checkpoints.quantization import GROUP_SIZE
from polybasic.chain.kernels.cuda.executor import CudaExecutor
from polybasic.chain.kernels.torch.rows import device_consecutive_rows
from tests.benchmarks.scripts import load_script

traffic = load_script("traffic")
estimates = load_script("gpu_estimate")

READ_EARLY = {"attend": ("positions", "prefix", "cache")}
"""What kernels read before they wait, beside weights: see `wait_for_previous`."""


def sizes(num_layers: int = 2) -> Any:
    return estimates.config_of("gpu-8b", num_layers=num_layers)


def test_a_layer_is_five_launches_and_its_bytes() -> None:
    for group_size, kind in ((0, "decoder"), (GROUP_SIZE, "awq")):
        single, double = (
            estimates.pass_of("", estimates.decoder_of(sizes(num), group_size), 300, 4)
            for num in (1, 2)
        )
        assert len(double.launches) - len(single.launches) == 5
        assert double.num_early - single.num_early == 5
        moved = traffic.decoder_pass(sizes(), kind, 2, 300, 4)
        # what is counted beside: rows between kernels, and in 4 bits nothing of another size
        assert moved.total < double.num_bytes < 1.01 * moved.total
        packed = sum(
            launch.num_bytes for launch in double.launches if launch.name == "product_kernel"
        )
        # the output projection is dense
        packed -= single.launches[-3].num_bytes if group_size else packed
        taken = packed / estimates.PACKED_BANDWIDTH[16]
        taken += (double.num_bytes - packed) / estimates.BANDWIDTH
        waited = (
            len(double.launches) * estimates.SERIAL_SECONDS + 2 * estimates.ATTENTION_SECONDS[16]
        )
        saved = double.num_early * (estimates.SERIAL_SECONDS - estimates.EARLY_SECONDS)
        assert double.seconds == pytest.approx(taken + waited - saved)


RECORD = Path(estimates.__file__).parent / "records" / "gpu-h200.md"
MOST_ROWS = 32
"""Of passes that are estimated well: dense ones of more take a fifth longer than their estimate."""
MEASURED_8B = {
    0: {(1, 256): 4.337, (8, 256): 4.492, (24, 256): 4.785},
    GROUP_SIZE: {(1, 256): 2.615, (8, 256): 2.671, (24, 256): 3.279},
}
"""Milliseconds of passes on an H200, by rows and context; of this shape the record has none."""


def measured(shape: str, group_size: int) -> dict[tuple[int, int], float]:
    if shape == "gpu-8b":
        return MEASURED_8B[group_size]
    member = "intermediate" if group_size else "target"
    _, section = RECORD.read_text().split(f"\n## {shape} passes\n")
    lines = section.split("\n## ")[0].splitlines()
    table = [line.strip("|").split("|") for line in lines if line.startswith(f"| {member} ")]
    found = {(int(rows), int(context)): float(median) for _, rows, context, _, median, *_ in table}
    return {size: median for size, median in found.items() if size[0] <= MOST_ROWS}


@pytest.mark.parametrize("group_size", [0, GROUP_SIZE])
@pytest.mark.parametrize("shape", ["gpu-7b", "gpu-8b"])
def test_estimates_are_what_was_measured(shape: str, group_size: int) -> None:
    model = estimates.decoder_of(estimates.config_of(shape), group_size)
    found = measured(shape, group_size)
    assert {(1, 256), (8, 256), (24, 256)} <= {*found}
    for (rows, context), milliseconds in found.items():
        estimate = estimates.pass_of("", model, context, rows)
        assert 1e3 * estimate.seconds == pytest.approx(milliseconds, rel=0.1)


def test_a_round_is_its_pass_and_what_draws_and_cuts() -> None:
    model = estimates.decoder_of(sizes(1))
    pass_names = [launch.name for launch in estimates.pass_of("", model, 300, 8).launches]
    for drawn in estimates.DRAWS:
        names = [launch.name for launch in estimates.block_of("", model, 300, 8, drawn).launches]
        assert {*pass_names} - {"search_chunks", "merge_chunks"} < {*names}
        assert "sort" not in names
        assert ("search_keys" in names) == ("top-p" in drawn)


def test_a_draft_is_as_many_launches_for_each_level() -> None:
    head = estimates.head_of(sizes())
    found = [estimates.draft_of("", head, 300, depth, 2) for depth in (3, 4, 5)]
    first, second = (len(more.launches) - len(fewer.launches) for fewer, more in pairwise(found))
    assert first == second
    assert {launch.name for launch in found[0].launches} >= {
        "attend",
        "take_beam",
        "cat",
        "embedding",
    }


def test_what_the_host_launches_alone_may_take_its_time() -> None:
    prompt = estimates.prompt_of("", estimates.decoder_of(sizes()), 70)
    assert prompt.seconds == max(
        prompt.num_bytes / estimates.BANDWIDTH + len(prompt.launches) * estimates.SERIAL_SECONDS,
        len(prompt.launches) * estimates.HOST_SECONDS,
    )
    assert all(not launch.can_be_early for launch in prompt.launches)


def test_a_prompt_unpacks_each_weight_in_one_launch() -> None:
    dense, packed = (
        estimates.prompt_of("", estimates.decoder_of(sizes(), group_size), 70)
        for group_size in (0, GROUP_SIZE)
    )
    num = sum(launch.name == "dequantize_kernel" for launch in packed.launches)
    assert num == len(packed.launches) - len(dense.launches) == 2 * 4


@dataclass
class Order(estimates.Launches):  # type: ignore[misc, name-defined]
    """Records what is written and read early, in order; tensors stay alive, and so their places."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.events: list[tuple[bool, list[Tensor], list[Tensor]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        num = len(self.found)
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if len(self.found) == num + 1 and not self.found[-1].can_be_early:
            written = [*args[:1], out] if func._schema.is_mutable else [out]
            self.events.append((False, [], estimates._tensors(written)))
        return out

    def launched(self, kernel: Any, arguments: dict[str, Any]) -> None:
        super().launched(kernel, arguments)
        read = [arguments[name] for name in READ_EARLY.get(kernel.fn.__name__, ())]
        unchanged = ("positions", "prefix", "visible")
        written = [
            argument
            for name, argument in arguments.items()
            if isinstance(argument, Tensor) and name not in unchanged
        ]
        self.events.append((self.found[-1].can_be_early, read, written))

    def read_too_early(self) -> Iterator[tuple[int, int]]:
        """Launches that write what a later one reads before its wait, with none between them that
        waits for all before it by being launched so."""
        for later, (is_early, read, _) in enumerate(self.events):
            places = set(map(estimates._place, read)) if is_early else set()
            for earlier in reversed(range(later)):
                was_early, _, written = self.events[earlier]
                if places & set(map(estimates._place, written)):
                    yield earlier, later
                if not was_early:
                    break


def order_of(function: Callable[[], object]) -> Order:
    return estimates.recorded(function, Order(300))  # type: ignore[no-any-return]


def rows_of(model: CudaExecutor, num: int) -> tuple[Tensor, Any, Any]:
    tokens = torch.empty(num, dtype=torch.int64, device="meta")
    return tokens, estimates.caches_of(model.config), estimates._number()


def test_a_pass_reads_nothing_early_that_is_being_written() -> None:
    model = estimates.decoder_of(sizes())
    tokens, caches, prefix = rows_of(model, 4)
    order = order_of(
        lambda: [
            model.forward(tokens, [caches], [device_consecutive_rows(prefix + step, 4)])
            for step in range(2)
        ]
    )
    assert sum(bool(read) for _, read, _ in order.events) == 4
    assert list(order.read_too_early()) == []


def test_a_draft_reads_nothing_early_that_is_being_written() -> None:
    head = estimates.head_of(sizes())
    _, caches, start = rows_of(head, 1)
    state = torch.empty(1, head.config.hidden_size, dtype=torch.bfloat16, device="meta")
    order = order_of(lambda: head.draft(state, caches, start, 4, 2))
    assert sum(bool(read) for _, read, _ in order.events) == 3
    assert list(order.read_too_early()) == []


def test_attention_without_a_pass_before_it_is_noticed() -> None:
    """What the two tests above would see if positions, or rows of a cache, were written late."""
    model = estimates.decoder_of(sizes())
    _, caches, prefix = rows_of(model, 4)
    heads, rotation = model.heads[0], model.weights.rotary.tables[0]
    width = (2 * heads.num_kv_heads + heads.num_kv_heads * heads.query_groups) * heads.head_dim
    qkv = torch.empty(4, width, dtype=torch.bfloat16, device="meta")

    def attend_twice() -> None:
        rows = device_consecutive_rows(prefix, 4)
        span = rows.span_of(model.config.kinds[0])
        assert span.visible.shape == (4, 4)
        for _ in range(2):
            model.operations.attention(qkv, caches[0], rows, span, heads, rotation)

    order = order_of(attend_twice)
    attending = [place for place, (_, read, _) in enumerate(order.events) if read]
    assert (attending[0], attending[1]) in list(order.read_too_early())
