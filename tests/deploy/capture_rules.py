"""What CUDA refuses while a stream is captured, found where tensors are on a CPU."""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

aten = torch.ops.aten

_HOST_READS = {
    Tensor.tolist,
    Tensor.numpy,
    Tensor.__array__,
    Tensor.item,
    Tensor.cpu,
    Tensor.__bool__,
    Tensor.__int__,
    Tensor.__float__,
    Tensor.__index__,
    Tensor.__repr__,
    Tensor.__format__,
}
_FROM_HOST_DATA = {
    torch.tensor,
    torch.as_tensor,
    torch.asarray,
    torch.from_numpy,
    Tensor.new_tensor,
}
_FACTORIES = {
    torch.arange,
    torch.empty,
    torch.empty_strided,
    torch.eye,
    torch.full,
    torch.linspace,
    torch.ones,
    torch.scalar_tensor,
    torch.zeros,
}
_REFUSED_TAGS = {
    torch.Tag.data_dependent_output: "reads device data on the host",
    torch.Tag.dynamic_output_shape: "has a shape that depends on device data",
    torch.Tag.nondeterministic_seeded: "draws random numbers of a generator",
}
_INDEXING = {
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._unsafe_index.Tensor,
}
"""By numbers they depend on no data, by a mask they do, whatever their tags say."""
_DRAWING_NOTHING = {aten._scaled_dot_product_flash_attention_for_cpu.default}
"""Without dropout."""


class CaptureRefused(RuntimeError):
    """What CUDA would refuse while a stream is captured."""


class RefusingHostData(TorchFunctionMode):
    """Refuses calls that would read on the host, or bring data from it, if tensors were on a GPU.

    What reaches the dispatcher is left to `refuse_operation`; some of these calls never do.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        if func in _HOST_READS:
            raise CaptureRefused(f"{name} reads device data on the host")
        if func in _FROM_HOST_DATA and not isinstance(args[-1], Tensor):
            raise CaptureRefused(f"{name} copies from the host")
        if func in _FACTORIES and kwargs.get("device") is None and kwargs.get("out") is None:
            raise CaptureRefused(f"{name} without a device makes its tensor on the host")
        if func is Tensor.to and "cpu" in [part for part in args[1:] if isinstance(part, str)]:
            raise CaptureRefused("to copies device data to the host")
        if func in (Tensor.__getitem__, Tensor.__setitem__) and _holds_list(args[1]):
            raise CaptureRefused("an index in a Python list is copied from the host")
        return func(*args, **kwargs)


def refuse_operation(func: Any, args: tuple[Any, ...]) -> None:
    """Raise for an operation, not composed of others, that needs data on the host.

    Raises:
        CaptureRefused: a read, a shape that depends on data, or a draw of a generator.
    """
    if func in _INDEXING:
        masks = [part for part in args[1] if part is not None and part.dtype == torch.bool]
        if masks:
            raise CaptureRefused(f"{func} by a mask counts its entries on the host")
        return
    for tag, reason in _REFUSED_TAGS.items():
        if tag in func.tags and func not in _DRAWING_NOTHING:
            raise CaptureRefused(f"{func} {reason}")


def _holds_list(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, list) for part in parts)
