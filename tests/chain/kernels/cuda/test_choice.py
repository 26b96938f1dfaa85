"""How kernels of products are chosen, with clocks of the tests' own."""

import json
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from polybasic.chain.kernels.cuda import choice
from polybasic.chain.kernels.cuda.choice import Choices, choices_of, choose
from polybasic.chain.kernels.cuda.product_launch import Product, Tiling
from polybasic.chain.kernels.cuda.product_options import (
    Option,
    Task,
    described,
    fixed_option,
    options_of,
)
from polybasic.chain.kernels.cuda.product_samples import relative_error, samples_of
from tests.chain.kernels.cuda.product_cases import ABSENT, CPU, random_product

PROCESSORS = 132
LINEARS = {
    "llama2-7b": [(12288, 4096), (4096, 4096), (22016, 4096), (4096, 11008), (32000, 4096)],
    "llama3-8b": [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096)],
    "qwen2-0.5b": [(1152, 896), (896, 896), (9728, 896), (896, 4864), (151936, 896)],
    "gemma2-2b": [(4096, 2304), (2304, 2048), (18432, 2304), (2304, 9216), (256000, 2304)],
}


@dataclass
class Clock:
    """Says how long each way takes, in the order in which ways are timed: given, then 9."""

    seconds: Sequence[float]
    calls: int = 0

    def __call__(self, functions: Sequence[Callable[[], object]]) -> list[float]:
        for function in functions:
            function()
        begin, self.calls = self.calls, self.calls + len(functions)
        return [*self.seconds, *([9.0] * self.calls)][begin : self.calls]


@pytest.fixture
def a_product() -> Product:
    return random_product(torch.bfloat16, 128, 256, 256, 3, has_norm=True)[0]


OPTIONS = [Tiling(128, 128), Tiling(128, 128, splits=2), Tiling(64, 128)]


def task(weight: str, out_size: int, in_size: int, rows: int) -> Task:
    return Task(weight, out_size, in_size, rows, False, False, False)


@pytest.mark.parametrize("rows", [16, 32, 64])
@pytest.mark.parametrize("weight", ["bfloat16", "float16 int4/128", "bfloat16 int4/64"])
@pytest.mark.parametrize("family", list(LINEARS))
def test_options_fill_the_card_and_no_more(family: str, weight: str, rows: int) -> None:
    for out_size, in_size in LINEARS[family]:
        options = options_of(task(weight, out_size, in_size, rows), PROCESSORS)
        most = max(-(-out_size // option.outs) * option.splits for option in options)
        steps = in_size // options[0].ins
        assert most > 0.6 * PROCESSORS or any(2 * each.splits > steps // 4 for each in options)
        assert 2 <= len(options) == len(set(options)) <= 6
        for option in options:
            programs = -(-out_size // option.outs) * option.splits
            assert option.splits == 1 or programs <= 4 * PROCESSORS
            assert option.splits == 1 or in_size // option.ins >= 4 * option.splits
            assert option.ins == int(weight.partition("/")[2] or option.ins)


def test_narrow_weights_are_split_and_wide_ones_are_not() -> None:
    splits = {
        out_size: options_of(task("bfloat16 int4/128", out_size, 8192, 32), PROCESSORS)[0].splits
        for out_size in (1024, 4096, 12288, 22016, 128256)
    }
    assert splits == {1024: 16, 4096: 8, 12288: 2, 22016: 1, 128256: 1}


def test_a_task_names_what_it_depends_on(a_product: Product) -> None:
    assert str(Task.of(a_product)) == "bfloat16 int4/128 256x256 16 rows norm"
    gated = random_product(torch.float16, ABSENT, 256, 256, 33, "silu")[0]
    assert str(Task.of(gated)) == "float16 256x256 64 rows gated"
    added = random_product(torch.float16, ABSENT, 256, 256, 17, has_added=True)[0]
    assert str(Task.of(added)) == "float16 256x256 32 rows added"


@pytest.mark.parametrize("group_size", [ABSENT, 64])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_samples_are_of_the_same_shapes(group_size: int, activation: str | None) -> None:
    found, _ = random_product(torch.bfloat16, group_size, 96, 128, 3, activation, has_norm=True)
    (sample,) = samples_of(found)
    assert Task.of(sample) == Task.of(found)
    assert not torch.equal(sample.x_RI, found.x_RI)
    expected = sample.computed(None)
    assert relative_error(sample, expected) < 1e-2
    assert 0.05 < float(expected.float().std()) < 5
    expected[0, 5] += 10
    assert relative_error(sample, expected) > choice.TOLERANCES[torch.bfloat16]


def test_the_fastest_is_chosen_with_the_norm_before_it_where_that_pays(a_product: Product) -> None:
    # three with the norm as a part, then the best two without
    fused, _ = choose(a_product, OPTIONS, Clock([3e-6, 1e-6, 2e-6, 4e-6, 5e-6]))
    assert fused == OPTIONS[1]
    unfused, microseconds = choose(a_product, OPTIONS, Clock([3e-6, 1e-6, 2e-6, 4e-6, 5e-7]))
    assert unfused == replace(OPTIONS[2], is_fused=False)
    assert sorted(microseconds.values()) == pytest.approx([0.5, 1, 2, 3, 4])
    assert microseconds[described(unfused)] == pytest.approx(0.5)


def test_the_best_is_tried_early_too(a_product: Product, monkeypatch: pytest.MonkeyPatch) -> None:
    computed = Product.computed
    # an interpreted kernel begins when it is called
    monkeypatch.setattr(
        Product, "computed", lambda self, option: computed(self, replace(option, is_early=False))
    )
    clock = Clock([3e-6, 1e-6, 2e-6, 4e-6, 5e-6, 5e-7])
    early, microseconds = choose(a_product, OPTIONS, clock, begins_early=True)
    assert early == replace(OPTIONS[1], is_early=True)
    assert len(microseconds) == 6
    clock = Clock([3e-6, 1e-6, 2e-6, 4e-6, 5e-6, 2e-6])
    assert choose(a_product, OPTIONS, clock, begins_early=True)[0] == OPTIONS[1]


def test_pytorch_is_an_option_for_dense_weights_alone(a_product: Product) -> None:
    dense, _ = random_product(torch.float16, ABSENT, 128, 128, 2, has_added=True)
    options = [Tiling(64, 64)]
    assert choose(dense, options, Clock([2e-6, 1e-6]))[0] is None
    assert choose(dense, options, Clock([1e-6, 2e-6]))[0] == options[0]
    assert "torch" not in choose(a_product, OPTIONS[:1], Clock([]))[1]


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> set[Option]:
    """Options in this set are wrong when they have two splits, else they fail."""
    options: set[Option] = set()
    computed = Product.computed

    def disturbed(self: Product, option: Option) -> Tensor:
        if option not in options:
            return computed(self, option)
        assert option is not None
        if option.splits == 1:
            raise RuntimeError("out of resource\nand more")
        return computed(self, option) * 2

    monkeypatch.setattr(Product, "computed", disturbed)
    return options


def test_wrong_and_failing_kernels_are_reported_and_dropped(
    a_product: Product, faulty: set[Option], caplog: pytest.LogCaptureFixture
) -> None:
    faulty |= set(OPTIONS[:2])
    chosen, microseconds = choose(a_product, OPTIONS, Clock([]))
    assert chosen is not None
    assert chosen.outs == OPTIONS[2].outs
    assert len(microseconds) == 2
    failed, wrong = (record.message for record in caplog.records)
    assert "kernel 128x128 splits 1 warps 4 stages 3 fails: out of resource" in failed
    assert "and more" not in failed
    assert re.search(r"kernel 128x128 splits 2 .* is wrong by (1|0\.99)", wrong)


def test_without_any_kernel_pytorch_computes(
    a_product: Product, faulty: set[Option], caplog: pytest.LogCaptureFixture
) -> None:
    faulty |= set(OPTIONS)
    assert choose(a_product, OPTIONS, Clock([])) == (None, {})
    assert "no kernel computes bfloat16 int4/128 256x256 16 rows norm" in caplog.text


def test_choices_are_kept_for_the_next_process(
    a_product: Product, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    file = tmp_path / "folder" / "choices.json"
    clock = Clock([2.0, 1.0])
    first = Choices(CPU, file, clock)
    option = first.option_for(a_product)
    assert option == options_of(Task.of(a_product), PROCESSORS)[1]
    num_calls = clock.calls
    assert first.option_for(a_product) == option
    other, _ = random_product(torch.float16, ABSENT, 64, 64, 2)
    first.option_for(other)
    assert clock.calls > num_calls
    assert capsys.readouterr().err == "choosing kernels on the interpreter, once on this machine\n"
    later_clock = Clock([])
    later = Choices(CPU, file, later_clock)
    assert later.option_for(a_product) == option
    assert later.option_for(other) == first.option_for(other)
    assert later.microseconds == first.microseconds
    assert later_clock.calls == 0
    assert capsys.readouterr().err == ""
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_processes_add_to_one_file(a_product: Product, tmp_path: Path) -> None:
    file = tmp_path / "choices.json"
    one, two = (Choices(CPU, file, Clock([])) for _ in range(2))
    other, _ = random_product(torch.float16, ABSENT, 64, 64, 2)
    one.option_for(a_product)
    two.option_for(other)
    assert set(json.loads(file.read_text())) == {str(Task.of(a_product)), str(Task.of(other))}


@pytest.mark.parametrize("content", ["{", "[]", '{"bfloat16": {"tiling": 3}}'])
def test_a_file_that_cannot_be_read_is_written_again(
    a_product: Product, tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "choices.json"
    file.write_text(content)
    Choices(CPU, file, Clock([])).option_for(a_product)
    assert "kernels are chosen again" in caplog.text
    assert list(json.loads(file.read_text())) == [str(Task.of(a_product))]


def test_a_folder_that_cannot_be_written_is_reported(
    a_product: Product, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    choices = Choices(CPU, tmp_path / "file" / "choices.json", Clock([]))
    with caplog.at_level(logging.WARNING):
        assert choices.option_for(a_product) is not None
    assert "cannot be written" in caplog.text


def test_the_file_is_of_the_card_and_the_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POLYBASIC_CACHE", str(tmp_path))
    choices_of.cache_clear()
    try:
        file = choices_of(CPU).file
        assert file is not None
        assert file.parent == tmp_path / "products"
        choices_of.cache_clear()
        monkeypatch.setattr(choice, "_card", lambda device: "another card")
        assert choices_of(CPU).file not in (None, file)
    finally:
        choices_of.cache_clear()


def test_what_is_interpreted_is_not_measured(a_product: Product) -> None:
    assert fixed_option(a_product) == options_of(Task.of(a_product), PROCESSORS)[0]
    assert fixed_option(a_product).ins == 128
