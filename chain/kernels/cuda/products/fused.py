"""Products of a few rows on a GPU, fused with what comes before and after: one launch each.

#   R = rows (tokens of one pass), I = in features, O = out features
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

from polybasic.chain.kernels.cuda.products.choice import choices_of
from polybasic.chain.kernels.cuda.products.launch import Product, normed
from polybasic.chain.kernels.cuda.products.options import Task, fixed_option
from polybasic.chain.kernels.torch.operations import DeviceLinear, Norm

_noted: ContextVar[dict[Task, Product] | None] = ContextVar("noted", default=None)


def product(
    linear: DeviceLinear, x_RI: Tensor, norm: Norm | None = None, added: Tensor | None = None
) -> Tensor:
    """`Operations.product` by the GPU's fastest kernel; many rows by PyTorch's operations."""
    added = None if added is None else added.contiguous()
    return _computed(Product(linear, x_RI, norm, added))


def gated_product(linear: DeviceLinear, x_RI: Tensor, norm: Norm | None, activation: str) -> Tensor:
    """`Operations.gated_product` by the GPU's fastest kernel; as `product`."""
    return _computed(Product(linear, x_RI, norm, activation=activation))


def norm(x_RI: Tensor, norm: Norm) -> Tensor:
    """`Operations.norm` of rows in one launch, whatever the dtype of the norm's weight."""
    return normed(x_RI, norm) if x_RI.stride(1) == 1 else normed(x_RI.contiguous(), norm)


@contextmanager
def noted() -> Iterator[dict[Task, Product]]:
    """Within it products are noted by their task, one of each, and are 0 instead of computed."""
    found: dict[Task, Product] = {}
    token = _noted.set(found)
    try:
        yield found
    finally:
        _noted.reset(token)


def prepare(products: Sequence[Product]) -> None:
    """Choose the kernels of products of one GPU together, whose kernels are compiled side by side.

    Without it each is chosen where it is first computed.
    """
    if products and products[0].x_RI.device.type == "cuda":
        choices_of(products[0].x_RI.device).prepare(products)


def _computed(product: Product) -> Tensor:
    if not product.can_launch:
        return product.computed(None)
    if (found := _noted.get()) is not None:
        found[Task.of(product)] = product
        num_outs = product.linear.shape[0] // (1 if product.activation is None else 2)
        return product.x_RI.new_zeros(len(product.x_RI), num_outs)
    if product.x_RI.device.type != "cuda":
        return product.computed(fixed_option(product))
    return product.computed(choices_of(product.x_RI.device).option_for(product))
