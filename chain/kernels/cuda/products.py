"""Products of a few rows on a GPU, fused with what comes before and after: one launch each.

#   R = rows (tokens of one pass), I = in features, O = out features
"""

from torch import Tensor

from polybasic.chain.kernels.cuda.choice import choices_of
from polybasic.chain.kernels.cuda.product_launch import Product, normed
from polybasic.chain.kernels.cuda.product_options import fixed_option
from polybasic.chain.kernels.torch.operations import DeviceLinear, Norm


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


def _computed(product: Product) -> Tensor:
    if not product.can_launch:
        return product.computed(None)
    if product.x_RI.device.type != "cuda":
        return product.computed(fixed_option(product))
    return product.computed(choices_of(product.x_RI.device).option_for(product))
