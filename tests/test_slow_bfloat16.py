"""Without AVX-512 nothing that trains or quantizes multiplies in bfloat16 or float16.

PyTorch takes ten times as long for such products there, and forty for those of a backward pass.
"""

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from polybasic.chain.kernels.product_times import multiplies_fast, product_times
from polybasic.chain.model.reference import load_reference_model
from tests.checkpoints import write_family
from tests.train.counting import write_counting

pytestmark = pytest.mark.processor
# a text is evaluated when a test is run, not when it is found
where_bfloat16_is_slow = pytest.mark.skipif(
    "multiplies_fast(torch.bfloat16)", reason="bfloat16 is fast here: make processors"
)
PRODUCTS = ("mm", "linear", "dot_product", "mv", "matmul", "conv")
"""Parts of the names of operations that multiply matrices."""


class Products(TorchDispatchMode):
    """Counts the matrix products of a block by the dtype of what they multiply."""

    def __enter__(self) -> "Products":
        product_times()  # measured before, if nobody has asked yet
        self.found = Counter[torch.dtype]()
        return super().__enter__()  # type: ignore[no-any-return, no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(part in func.name().split(".")[0] for part in PRODUCTS):
            given = (each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor))
            self.found[next(given).dtype] += 1
        return func(*args, **(kwargs or {}))

    @property
    def halves(self) -> int:
        """Products in a dtype of two bytes."""
        return self.found[torch.bfloat16] + self.found[torch.float16]


@pytest.fixture(scope="module")
def conversations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "counting.jsonl"
    return Path(write_counting(path, "Count on from {}.", 4, 5))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model that is stored in bfloat16."""
    folder = tmp_path_factory.mktemp("models") / "target"
    write_family(folder, "llama3")
    return folder


def train_head(target: Path, conversations: Path, out: Path, **changes: Any) -> Products:
    """A head for it, with an evaluation on answers of the target."""
    from polybasic.train.run.training import train_head
    from polybasic.train.settings import DataSettings, HeadSettings

    settings = HeadSettings(
        num_steps=2, warmup_steps=1, batch_size=2, eval_answer_tokens=8, eval_tree_depth=2,
        **changes,
    )  # fmt: skip
    data = DataSettings(num_heldout=4, max_tokens=64)
    with Products() as products:
        train_head(target, str(conversations), data, settings, 0, out)
    return products


def assert_in_float32(products: Products) -> None:
    assert products.halves == 0, products.found
    assert products.found[torch.float32] > 10


@where_bfloat16_is_slow
def test_no_product_of_a_head_is_in_bfloat16(
    target: Path, conversations: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert load_reference_model(target, "auto").dtype == torch.bfloat16
    assert_in_float32(train_head(target, conversations, tmp_path / "head"))
    assert "products take" not in capsys.readouterr().err
    slow = train_head(target, conversations, tmp_path / "slow", dtype="bfloat16")
    assert slow.halves > 10
    told = capsys.readouterr().err
    assert "train.dtype bfloat16: products take" in told
    assert "times as long as in float32 on this CPU" in told


@where_bfloat16_is_slow
def test_no_product_of_a_quantization_is_in_bfloat16(target: Path, tmp_path: Path) -> None:
    from polybasic.quantize.awq import quantize_target
    from polybasic.quantize.distillation import distill_intermediate
    from polybasic.quantize.quality import compare_models, measure_quality
    from polybasic.quantize.settings import DistillSettings, QuantizeSettings

    copy = tmp_path / "intermediate"
    draw = random.Random(0)
    rows = [[draw.randrange(300) for _ in range(40)] for _ in range(20)]
    settings = QuantizeSettings(num_calibration_samples=4, calibration_tokens=32)
    short = DistillSettings(num_steps=2, batch_tokens=64, row_tokens=32)
    with Products() as products:
        quantize_target(target, rows, settings, 0, copy)
        distill_intermediate(target, copy, rows, rows, short, 64, 0, tmp_path / "distilled")
        measure_quality(target, copy, rows, 64)
    assert_in_float32(products)
    with Products() as slow:
        model = load_reference_model(target, torch.bfloat16)
        compare_models(model, model, rows, 64)
    assert slow.halves > 10


def test_what_is_fast_is_told_from_what_is_slow() -> None:
    times = product_times()
    assert multiplies_fast(torch.float32)
    for name, timing in times.items():
        assert timing.forward > 0
        assert timing.backward > 0
        is_slow = timing.forward > 2 * times["float32"].forward
        assert multiplies_fast(getattr(torch, name)) == (not is_slow)
