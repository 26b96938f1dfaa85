"""Repairs of Triton's interpreter, in which kernels run where there is no GPU."""

import importlib.util
from typing import Any


def _let_scalars_end_loops() -> None:
    """Triton 3.6 turns arrays of one number into ints, which NumPy refuses from 2.4 on."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_and_repair(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_and_repair


def _multiply_bfloat16() -> None:
    """Triton's interpreter multiplies the bits of bfloat16 as if they were whole numbers."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    create_dot = interpreter.InterpreterBuilder.create_dot

    def widened(factor: Any) -> Any:
        if factor.dtype.scalar != tl.bfloat16:
            return factor
        bits = factor.data.astype(np.uint32) << 16
        return interpreter.TensorHandle(bits.view(np.float32), tl.float32)

    def create_wide_dot(self: Any, a: Any, b: Any, *others: Any) -> Any:
        return create_dot(self, widened(a), widened(b), *others)

    interpreter.InterpreterBuilder.create_dot = create_wide_dot


if importlib.util.find_spec("triton") is not None:
    _let_scalars_end_loops()
    _multiply_bfloat16()
