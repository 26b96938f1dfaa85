"""Products of few rows as passes are made of: the runtime's kernels beside others.

Each multiplies with the same weight of all layers of a loaded model, one after the other, as a pass
does: they come from memory. What stands before and behind a product, norm, activation and residual,
is a part of it, which the runtime's kernels compute in the same launch and the others in launches
of their own. Whoever is wrong is not timed.
"""

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from gpu_budget import Allowance
from gpu_clock import captured, device_seconds
from gpu_names import CUBLAS, GEMLITE, PYTORCH_INT4, RUNTIME
from torch import Tensor

from polybasic.chain.formats.awq import QuantizedWeight
from polybasic.chain.kernels.torch.operations import DeviceLinear, Norm, Operations
from polybasic.chain.kernels.torch.packed_weight import PackedWeight
from polybasic.chain.model.device_model import DeviceModel
from polybasic.chain.model.linear import Linear
from polybasic.deploy.graphs.capture import Graphs

MOST_ERROR = 0.05
"""Relative, from which on a result is wrong; 4-bit scales rounded to bfloat16 are off by 0.005."""
SECONDS, TUNING_SECONDS = 0.5, 15.0
"""That one product takes to be captured and timed; gemlite tries all of its kernels before."""
INNER_TILES = 8
"""Of PyTorch's layout for its int4 kernel."""
_KERNEL_ZERO = 8


@dataclass(frozen=True)
class ProductSettings:
    """What is measured: rows, the more important first."""

    rows: tuple[int, ...]
    repeats: int
    turns: int


@dataclass(frozen=True)
class Products:
    """One product of every layer of a model.

    Attributes:
        norms: before each; None for none.
        like: a tensor of the device and dtype of the rows.
        adds: whether the residual is added behind it.
        activation: of its first half, by which the second is multiplied; None for none.
    """

    linears: list[DeviceLinear]
    norms: list[Norm | None]
    like: Tensor
    adds: bool = False
    activation: str | None = None

    def by(self, operations: Operations, linear: Any, number: int, x: Tensor) -> Tensor:
        """The product of a layer by some operations, with `linear` in the place of its own."""
        norm = self.norms[number]
        if self.activation is not None:
            return operations.gated_product(linear, x, norm, self.activation)
        added = x.new_ones(len(x), self.linears[0].shape[0]) if self.adds else None
        return operations.product(linear, x, norm, added)

    def rows(self, num: int) -> Tensor:
        """[num, I] of random numbers."""
        generator = torch.Generator().manual_seed(num)
        x = torch.randn(num, self.linears[0].shape[1], generator=generator)
        return x.to(self.like)

    @property
    def num_bytes(self) -> int:
        """Of one layer's weight."""
        weight = self.linears[0].weight
        return weight.num_bytes if isinstance(weight, PackedWeight) else weight.nbytes


def products_of(model: DeviceModel) -> dict[str, Products]:
    """The products of a model's layers, by name."""
    layers, activation = model.parts.layers, model.parts.config.activation
    none: list[Norm | None] = [None] * len(layers)
    mlp_norms: list[Norm | None] = [one.mlp_norm for one in layers]
    like = model.parts.embedding
    return {
        "qkv": Products([one.qkv for one in layers], [one.input_norm for one in layers], like),
        "out": Products([one.out for one in layers], none, like, adds=True),
        "gate_up": Products(
            [one.gate_up for one in layers], mlp_norms, like, activation=activation
        ),
        "down": Products([one.down for one in layers], none, like, adds=True),
    }


@torch.inference_mode()
def measure_products(
    model: DeviceModel,
    settings: ProductSettings,
    bandwidth: float,
    found: dict[str, Any],
    allowance: Allowance,
) -> None:
    """Time the products of a model by rows and kernel.

    Args:
        bandwidth: bytes a second, by which bounds are computed.
        found: product -> rows -> kernel -> microseconds of one layer; filled on the way.
    """
    products = products_of(model)
    kernels = {
        name: _kernels(one, model.operations, found.setdefault("errors", {}).setdefault(name, {}))
        for name, one in products.items()
    }
    device = model.parts.embedding.device
    graphs = Graphs(device, most=8)
    for rows in settings.rows:
        for name, one in products.items():
            runs = {}
            for kernel, run in kernels[name].items():
                what = f"{name}, {rows} rows, {kernel}"
                if allowance.allows(what, TUNING_SECONDS if kernel == GEMLITE else SECONDS):
                    with allowance.trying(what):
                        key, x = (name, rows, kernel), one.rows(rows)
                        runs[kernel] = captured(graphs, key, partial(run, x))
            taken = device_seconds(runs, settings.turns, settings.repeats, device)
            for kernel, spread in taken.items():
                each = spread.times(1 / len(one.linears))
                found.setdefault(name, {}).setdefault(str(rows), {})[kernel] = {
                    "microseconds": each.times(1e6).to_json(),
                    "times_bound": each.median * bandwidth / one.num_bytes,
                }
            allowance.save()


def _kernels(
    products: Products, operations: Operations, errors: dict[str, float | str]
) -> dict[str, Callable[[Tensor], None]]:
    """What multiplies with all layers, by name; only those that are right.

    Args:
        errors: relative error of each, or how it failed; filled.
    """
    makers: dict[str, Callable[[DeviceLinear], Any]] = {RUNTIME: lambda linear: linear}
    if isinstance(products.linears[0].weight, PackedWeight):
        makers[PYTORCH_INT4] = pytorch_int4
        if importlib.util.find_spec("gemlite") is not None:
            makers[GEMLITE] = gemlite
    else:
        makers[CUBLAS] = lambda linear: linear
    x = products.rows(3)
    expected = products.by(Operations(), _float32(products.linears[0]), 0, x).float()
    found = {}
    for name, make in makers.items():
        computes = operations if name == RUNTIME else Operations()
        try:
            linears = [make(linear) for linear in products.linears]
            result = products.by(computes, linears[0], 0, x).float()
        except Exception as error:  # of a package that is only compared with
            errors[name] = f"{type(error).__name__}: {error}"
            continue
        distance = float((result - expected).norm() / expected.norm())
        errors[name] = distance
        if distance < MOST_ERROR:
            found[name] = _over_all(products, computes, linears)
    return found


def _over_all(
    products: Products, operations: Operations, linears: Sequence[Any]
) -> Callable[[Tensor], None]:
    def run(x: Tensor) -> None:
        for number, linear in enumerate(linears):
            products.by(operations, linear, number, x)

    return run


def _float32(linear: DeviceLinear) -> Linear:
    weight = linear.dense(torch.float32).float()
    return lambda x: (x.float() @ weight.t()).to(x.dtype)


def pytorch_int4(linear: DeviceLinear) -> Linear:
    """PyTorch's kernel for groups of 4-bit codes: (code - 8) * scale + offset."""
    weight = quantized(linear)
    scales = weight.scales.bfloat16()
    offsets = (_KERNEL_ZERO - weight.zeros.float()) * scales.float()
    joined = torch.stack([scales, offsets.bfloat16()], 2).transpose(0, 1).contiguous()
    group_size, operators = weight.group_size, torch.ops.aten
    if weight.codes.device.type == "cpu":
        packed = operators._convert_weight_to_int4pack_for_cpu(weight.codes.int(), 1)
        on_cpu = operators._weight_int4pack_mm_for_cpu
        return lambda x: on_cpu(x, packed, group_size, joined)
    pairs = weight.codes[:, ::2] << 4 | weight.codes[:, 1::2]
    packed = operators._convert_weight_to_int4pack(pairs.contiguous(), INNER_TILES)
    return lambda x: operators._weight_int4pack_mm(x, packed, group_size, joined)


def gemlite(linear: DeviceLinear) -> Linear:
    """gemlite's Triton kernels, which it tunes when they are first called with a shape."""
    from gemlite import DType, GemLiteLinear

    weight = quantized(linear)
    out_size, in_size = weight.codes.shape
    layer = GemLiteLinear(
        4,
        group_size=weight.group_size,
        in_features=in_size,
        out_features=out_size,
        input_dtype=DType.BF16,
        output_dtype=DType.BF16,
    )
    layer.pack(weight.codes, weight.scales.bfloat16(), weight.zeros.bfloat16())
    found: Linear = layer
    return found


def quantized(linear: DeviceLinear) -> QuantizedWeight:
    """The codes of a packed weight, in no layout."""
    weight = linear.weight
    assert isinstance(weight, PackedWeight)
    scales, zeros = weight.scales.t().contiguous(), weight.zeros.t().contiguous()
    dense = weight.dequantized(torch.float32).unflatten(1, (scales.shape[1], -1))
    codes = (dense / scales[..., None]).round() + zeros[..., None]
    return QuantizedWeight(codes.flatten(1).to(torch.uint8), zeros.to(torch.uint8), scales)


def choices(device: torch.device) -> Mapping[str, Mapping[str, float]]:
    """What the runtime has compared on a GPU so far: task -> way -> microseconds."""
    if device.type != "cuda":
        return {}
    from polybasic.chain.kernels.cuda.choice import choices_of

    return choices_of(torch.device("cuda", torch.cuda.current_device())).microseconds
