"""How kernels of products are chosen, with clocks of the tests' own."""

import json
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from polybasic.chain.kernels.cuda.products import choice
from polybasic.chain.kernels.cuda.products.choice import (
    Choices,
    Contest,
    Timer,
    choices_of,
    decide,
)
from polybasic.chain.kernels.cuda.products.launch import Product, Tiling
from polybasic.chain.kernels.cuda.products.options import (
    Option,
    Task,
    described,
    fixed_option,
    options_of,
)
from polybasic.chain.kernels.cuda.products.samples import (
    num_samples,
    relative_error,
    samples_of,
)
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


CHANGES = {"outs": 64, "ins": 64, "splits": 1, "warps": 8, "stages": 4, "registers": 128}
OPTIONS = [Tiling(128, 128), Tiling(128, 128, splits=2), Tiling(64, 128)]


def choose(
    product: Product, options: Sequence[Tiling], timer: Timer, begins_early: bool = False
) -> tuple[Option, dict[str, float]]:
    """What one product's contest decides."""
    contest = Contest(product, options, timer, begins_early)
    decide([contest])
    return contest.result()


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


def test_samples_exceed_the_cache_unless_they_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    card = SimpleNamespace(L2_cache_size=60 << 20)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    sizes = (4 << 10, 4 << 20, 12 << 20, 180 << 20, 200 << 20)
    found = [num_samples(size, torch.device("cuda")) for size in sizes]
    assert found == [32, 32, 16, 2, 2]


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


@pytest.mark.parametrize("fails_early_alone", [True, False])
def test_options_that_fail_in_a_capture_are_dropped(
    a_product: Product,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    fails_early_alone: bool,
) -> None:
    """Kernels begin early for the first time where they are timed, in a graph."""
    computed, clock = Product.computed, Clock([3e-6, 1e-6, 2e-6, 4e-6, 5e-6])
    is_capturing = False

    def disturbed(self: Product, option: Option) -> Tensor:
        assert option is not None
        if is_capturing and (option.is_early or not fails_early_alone):
            raise RuntimeError("operation not permitted when stream is capturing\nand more")
        return computed(self, replace(option, is_early=False))

    def timer(functions: Sequence[Callable[[], object]]) -> list[float]:
        nonlocal is_capturing
        is_capturing = True
        try:
            return clock(functions)
        finally:
            is_capturing = False

    monkeypatch.setattr(Product, "computed", disturbed)
    chosen, microseconds = choose(a_product, OPTIONS, timer, begins_early=True)
    said = [record.message for record in caplog.records]
    reason = "fails: operation not permitted when stream is capturing"
    if fails_early_alone:
        assert (chosen, len(microseconds)) == (OPTIONS[1], 5)
        assert [line.endswith(f", early {reason}") for line in said] == [True]
    else:
        assert (chosen, microseconds) == (None, {})
        assert [line.endswith(reason) for line in said] == [True, True, True, False]
        assert said[-1].startswith("no kernel computes bfloat16 int4/128 256x256 16 rows norm")


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


def test_a_second_gpu_is_measured_on_itself(
    a_product: Product, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, current = torch.device("cuda", 1), list[torch.device]()

    @contextmanager
    def on(chosen: torch.device) -> Iterator[None]:
        current.append(chosen)
        yield
        current.pop()

    def timer(functions: Sequence[Callable[[], object]]) -> list[float]:
        assert current == [device]
        return [1.0] * len(functions)

    card = SimpleNamespace(multi_processor_count=PROCESSORS)
    fake = {
        "device": on,
        "is_current_stream_capturing": lambda: False,
        "get_device_name": str,
        "get_device_properties": lambda _: card,
        "get_device_capability": lambda _: (8, 0),
    }
    for name, value in fake.items():
        monkeypatch.setattr(torch.cuda, name, value)
    assert Choices(device, None, timer).option_for(a_product) is not None
    assert current == []


def test_kernels_of_all_products_are_compiled_together(
    a_product: Product, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[list[tuple[Product, Tiling]]] = []
    monkeypatch.setattr(choice, "compile_together", lambda wanted: compiled.append(list(wanted)))
    other, _ = random_product(torch.float16, ABSENT, 64, 64, 2)
    choices = Choices(CPU, None, Clock([]))
    choices.prepare([a_product, a_product, other])
    assert set(choices.microseconds) == {str(Task.of(product)) for product in (a_product, other)}
    options = [options_of(Task.of(product), PROCESSORS) for product in (a_product, other)]
    assert [option for _, option in compiled[0]] == [*options[0], *options[1]]
    assert [option.is_fused for _, option in compiled[1]] == [False, False]
    choices.option_for(a_product)
    choices.prepare([other])
    assert len(compiled) == Contest.NUM_STAGES, "nothing is decided twice"


def test_products_share_kernels_whatever_their_sizes(a_product: Product) -> None:
    wide, _ = random_product(torch.bfloat16, 128, 512, 256, 5, has_norm=True)
    tiling = Tiling(128, 128, splits=2)
    key = a_product.kernel_key(tiling)
    assert wide.kernel_key(replace(tiling, splits=4)) == key
    one_row = replace(a_product, x_RI=a_product.x_RI[:1])
    without = replace(a_product, norm=None)
    changes = [replace(tiling, **{name: value}) for name, value in CHANGES.items()]
    keys = [one_row.kernel_key(tiling), without.kernel_key(tiling)]
    keys += [a_product.kernel_key(changed) for changed in changes]
    assert key not in keys
    assert without.kernel_key(tiling) == a_product.kernel_key(replace(tiling, is_fused=False))


def test_processes_add_to_one_file(a_product: Product, tmp_path: Path) -> None:
    file = tmp_path / "choices.json"
    first, second = (Choices(CPU, file, Clock([])) for _ in range(2))
    other, _ = random_product(torch.float16, ABSENT, 64, 64, 2)
    first.option_for(a_product)
    second.option_for(other)
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
