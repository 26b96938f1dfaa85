"""The scripts on a tiny chain: what they measure, and two checkouts in turns."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from polybasic.chain.base.errors import UserError
from polybasic.deploy import load_chain
from polybasic.deploy.runtime.hardware import describe_hardware
from polybasic.deploy.runtime.rounds import stages
from polybasic.deploy.runtime.rounds.sampling import Sampling
from polybasic.train.data.shipped import heldout_shipped
from tests.benchmarks.scripts import load_script
from tests.checkpoints import write_family

measuring, passes, rounds = (load_script(name) for name in ("measuring", "passes", "rounds"))
end_to_end, bench, products = (load_script(name) for name in ("end_to_end", "bench", "products"))
systems, command, contexts = (load_script(name) for name in ("systems", "command", "contexts"))
answering, memory, sharing = (load_script(name) for name in ("answering", "memory", "sharing"))
sequences = load_script("sequences")

SHORT = "--max-new-tokens 6 --turns 2"
ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Little memory is read, and eager operations need no compiler."""
    monkeypatch.setattr(measuring, "buffer_bytes", lambda device: 1 << 20)
    monkeypatch.setattr(products, "last_cache_bytes", lambda device: 1 << 16)
    monkeypatch.setenv("POLYBASIC_KERNELS", "eager")


def run(script: Any, words: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "argv", ["x", *words.split()])
    return script.main()


def written(script: Any, words: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The record of a script, which says what was run where."""
    run(script, f"{words} --record {path}", monkeypatch)
    text = path.read_text()
    assert str(path.parent) not in text, "no place on this machine stays in a record"
    assert f"- command: `python benchmarks/{script.__name__}.py" in text
    assert describe_hardware(CPU)["processor"] in text
    return text


@pytest.fixture
def bandwidth() -> Any:
    return measuring.measure_bandwidth(CPU)


def test_passes_beside_busy_processes(tiny_chain: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(sharing, "PASSES_IN_A_ROW", 2)
    monkeypatch.setattr(sharing, "SETTLING_SECONDS", 0.0)
    words = f"{tiny_chain} --context 20 --rows 2 --only target --busy 1 --turns 1"
    text = written(sharing, words, tmp_path / "record.md", monkeypatch)
    rows = [line.split("|")[1:5] for line in text.splitlines() if line.startswith("| target")]
    assert [[cell.strip() for cell in row[:3]] for row in rows] == [
        ["target", "2", "0"],
        ["target", "2", "1"],
    ]


def test_answers_of_a_model_alone_many_at_a_time(tmp_path: Path, monkeypatch) -> None:
    write_family(tmp_path / "model", "llama3")
    words = f"{tmp_path / 'model'} --sequences 1 3 --turns 2 --temperature 0.8"
    text = written(sequences, words, tmp_path / "record.md", monkeypatch)
    rows = [line.split("|")[1:] for line in text.splitlines() if line.startswith(("| 1 ", "| 3 "))]
    for number, row in zip((1, 3), rows, strict=True):
        low, median, high, rate = map(float, row[1:5])
        assert 0 < low <= median <= high
        assert rate == pytest.approx(1e3 * number / median, rel=0.05)


def test_passes_and_drafts_have_bounds(tiny_chain: Path, bandwidth: Any) -> None:
    chain = load_chain(tiny_chain)

    def measured(settings: Any) -> list[Any]:
        cases = (
            each(chain, settings, bandwidth) for each in (passes.pass_cases, passes.draft_cases)
        )
        return [cost for group in cases for cost in measuring.all_of(group)]

    found = measured(passes.PassSettings((16,), (1, 3), ("2x2",), repeats=2, turns=2))
    of_rows = [(name, rows) for rows in ("1 rows", "3 rows") for name in chain.engine.verifiers]
    assert [(cost.member, cost.what) for cost in found] == [*of_rows, ("draft", "2x2")]
    for cost in found:
        assert len(cost.seconds.turns) == 2
        assert cost.bound_seconds == cost.moved.total / bandwidth.bound
        assert cost.times_bound == cost.seconds.median / cost.bound_seconds
    (only,) = measured(passes.PassSettings((16,), (2,), ("1x2",), 1, 1, only=("draft",)))
    assert only.what == "1x2"


@pytest.mark.parametrize(
    ("words", "match"),
    [
        ("--only drift", "no such member"),
        ("--contexts 4000", "context out of range"),
        ("--shapes seven", "no shape of a draft"),
    ],
)
def test_passes_that_cannot_be_measured_are_refused(
    words: str, match: str, tiny_chain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = "--rows 1 --shapes 2x2 --contexts 16 --turns 1 --repeats 1"
    with pytest.raises(UserError, match=match):
        run(passes, f"{tiny_chain} {short} {words}", monkeypatch)


def test_wrong_input_is_one_line_and_exit_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["x", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        command.run(passes.main)
    assert ended.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1
    monkeypatch.setattr(sys, "argv", ["x", str(tmp_path), "--turns", "0"])
    with pytest.raises(SystemExit) as ended:
        command.run(passes.main)
    assert ended.value.code == 2


def test_rounds_break_down_whole_answers(
    tiny_chain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bandwidth: Any
) -> None:
    walk, chain = stages.walk, load_chain(tiny_chain, dtype="float32")
    plan = systems.chosen_plans(chain, ["polybasic_full"])["polybasic_full"]
    (prompt, *_) = systems.read_prompts(chain, None, 1, 12)
    found = rounds.measure_rounds(chain, {"full": plan}, [prompt], 12, 2)["full"]
    assert stages.walk is walk, "timers are taken off"
    assert not {"keep", "truncate"} & vars(chain.engine.verifiers["target"].cache).keys()
    answer = chain.stream_ids(prompt, 12, Sampling(0.0), plan)
    ids = [token for new in answer for token in new]
    for turn in found.turns:
        assert turn.tokens == len(ids) - 1, "timed rounds are those of the answer"
        of_answer = answer.statistics.forward_passes
        assert turn.passes == {name: of_answer[name] for name in ("target", "intermediate")}
    parts = ("states", "logits", "choice of tokens")
    assert set(found.operations()) == {
        *(f"{name}: {part}" for name in ("target", "intermediate") for part in parts),
        "target: verification of blocks",
        *("draft", "walk", "blocks", "observe", "cache moves", rounds.REST),
    }
    assert sum(found.total.operations.values()) == pytest.approx(found.total.seconds)
    by_member = found.passes(chain, bandwidth)
    assert set(by_member) == {"target", "intermediate", "draft"}
    assert by_member["intermediate"].count == found.total.rounds
    words = f"{tiny_chain} --dtype float32 {SHORT} --systems target polybasic_full"
    assert "if it cost nothing" in written(rounds, words, tmp_path / "r.md", monkeypatch)


def test_systems_are_those_that_the_chain_has_members_for(tiny_chain: Path) -> None:
    chain = load_chain(tiny_chain)
    assert {name: plan.members for name, plan in systems.system_plans(chain).items()} == {
        "target": ("target",),
        "eagle2": ("target", "draft"),
        "polybasic_full": ("target", "intermediate", "draft"),
    }
    further = systems.chosen_plans(chain, [], ["target,intermediate"])
    assert list(further) == ["target,intermediate"]
    for names, members in ((["ngram"], []), ([], ["target,drift"])):
        with pytest.raises(UserError):
            systems.chosen_plans(chain, names, members)


def test_prompts_without_a_file_are_shipped_ones_that_are_held_out(
    tiny_chain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = load_chain(tiny_chain)
    monkeypatch.setattr(chain, "encode", lambda text: [text])
    asked = [text for (text,) in systems.read_prompts(chain, None, systems.QUESTIONS_PER_TASK, 6)]
    heldout = {row["messages"][0]["content"] for row in heldout_shipped()}
    assert 40 < len(asked) == len(set(asked)) < len(heldout)
    assert set(asked) < heldout


def test_prompts_have_the_lengths_asked_for(
    tiny_chain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = load_chain(tiny_chain)
    lengths = [18, 40, 21, 30, 19, 70, 25]
    questions = [[number] * length for number, length in enumerate(lengths)]
    monkeypatch.setattr(systems, "read_prompts", lambda *_: questions)
    found = {num: systems.prompts_of_length(chain, None, num, 3, 12) for num in (20, 150, 60)}
    assert found[20] == [questions[2], questions[4], questions[0]], "the nearest, as they are"
    assert [len(prompt) for prompt in found[150]] == [150] * 3
    for number, prompt in enumerate(found[150]):
        assert prompt[-len(questions[number]) :] == questions[number]
        assert len(set(prompt)) > 2, "real questions stand before it"
    # one that is longer is no end of a shorter context
    assert [set(prompt[-18:]) for prompt in found[60]] == [{0}, {1}, {2}]


def test_end_to_end_compares_systems(tiny_chain: Path) -> None:
    chain = load_chain(tiny_chain, dtype="float32")
    plans = systems.chosen_plans(chain, ["target", "eagle2"])
    plans[end_to_end.HF_GENERATE] = plans["target"]
    here = answering.Here(chain)
    by_system = dict.fromkeys(plans, here)
    by_system[end_to_end.HF_GENERATE] = answering.HfGenerate.of(chain)
    prompts = systems.read_prompts(chain, None, 1, 8)[:2]
    settings = ({end_to_end.HERE: by_system}, plans, prompts, 8, 2)
    times = end_to_end.measure_end_to_end(*settings)[end_to_end.HERE]
    for measured in times.values():
        assert [len(turn) for turn in measured.turns] == [2, 2]
        assert measured.num_identical(times["target"]) == 2, "greedy, in float32"
    first = times["target"].turns[0]
    per_token = (
        1e3
        * sum(answer.seconds for answer in first)
        / sum(len(answer.token_ids) for answer in first)
    )
    assert times["target"].per_token.turns[0] == pytest.approx(per_token)
    assert times["target"].tokens_per_target_pass == 1
    over = iter([False, True])
    cut = end_to_end.measure_end_to_end(*settings, is_over=lambda: next(over))
    assert [len(turn) for turn in cut[end_to_end.HERE]["eagle2"].turns] == [1], "as far as it came"
    assert end_to_end.measure_end_to_end(*settings, is_over=lambda: True) == {}


CLONED = """
_load_chain = load_chain

def load_chain(*arguments, **options):
    print("this is the clone")  # on stdout, where it must not be taken for a reply
    return _load_chain(*arguments, **options)
"""


@pytest.mark.proof
def test_two_checkouts_in_turns(
    tiny_chain: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    clone = tmp_path / "clone"
    for folder in ("chain", "train", "quantize", "deploy", "recipes"):
        shutil.copytree(ROOT / folder, clone / folder)
    shutil.copy(ROOT / "__init__.py", clone)
    (loading,) = (
        path for path in clone.glob("deploy/**/*.py") if "def load_chain(" in path.read_text()
    )
    loading.write_text(loading.read_text() + CLONED)
    monkeypatch.setattr(end_to_end, "PAUSE_SECONDS", 0.0)
    words = f"{tiny_chain} --dtype float32 --max-new-tokens 6 --turns 1 --systems eagle2"
    words += f" --against {clone}"
    text = written(end_to_end, words, tmp_path / "record.md", monkeypatch)
    assert capfd.readouterr().err.count("this is the clone") == 1
    assert "eagle2: here" in text
    assert "7 of 7 answers identical" in text
    with pytest.raises(UserError, match="no checkout"):
        run(end_to_end, f"{tiny_chain} --against {tmp_path}", monkeypatch)


def test_bench_writes_a_record_and_compares_with_it(
    tiny_chain: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    records, read_prompts = tmp_path / "records", bench.read_prompts
    monkeypatch.setattr(bench, "read_prompts", lambda *given: read_prompts(*given)[:3])
    words = f"{tiny_chain} --records {records} --context 16 --rows 2 --shapes 2x2 --repeats 2"
    words += f" --num-prompts-per-task 1 {SHORT}"
    assert run(bench, words, monkeypatch) == 0
    path, beside = sorted(records.iterdir())
    assert path.name == f"cpu-{describe_hardware(CPU)['cores']}-cores-bench.json"
    assert "Milliseconds a pass" in beside.read_text()
    assert "no record of this hardware was there" in capsys.readouterr().out
    assert str(tmp_path) not in path.read_text()
    content = json.loads(path.read_text())
    # more than the chain can gain
    name = "tokens a pass polybasic_full"
    content["figures"][name] = [2 * figure for figure in content["figures"][name]]
    path.write_text(json.dumps(content))
    before = path.read_bytes()
    assert run(bench, f"{words} --strict", monkeypatch) == 1
    shown = capsys.readouterr().out.partition("Against the record")[2]
    assert "slower" in next(line for line in shown.splitlines() if name in line)
    assert path.read_bytes() == before, "a record changes by --update alone"
    with pytest.raises(UserError, match="record of other settings"):
        run(bench, words.replace("--context 16", "--context 20"), monkeypatch)


def test_the_record_in_the_tree_is_one_that_bench_reads() -> None:
    (path,) = bench.RECORDS.glob("*.json")
    content = json.loads(path.read_text())
    assert bench.record_of(bench.RECORDS, content["hardware"]) == (path, content)
    for figure in content["figures"].values():
        assert len(figure) >= 2
    for plan in content["plans"].values():
        bench.Plan.model_validate(plan)


def test_record_is_found_by_its_hardware(tmp_path: Path) -> None:
    hardware = {"device": "cpu", "processor": "A 1", "cores": 2, "threads": 2}
    assert bench.record_of(tmp_path, hardware) == (tmp_path / "cpu-2-cores-bench.json", None)
    content = {"schema": bench.SCHEMA, "hardware": hardware}
    (tmp_path / "cpu-2-cores-bench.json").write_text(json.dumps(content))
    (tmp_path / "another.json").write_text(json.dumps({"hardware": hardware}))
    assert bench.record_of(tmp_path, hardware | {"memory_bytes": 3})[1] == content
    other = tmp_path / "cpu-2-cores-b-2-bench.json"
    assert bench.record_of(tmp_path, hardware | {"processor": "B (2)"}) == (other, None)
    assert bench.record_of(tmp_path, hardware | {"threads": 1})[1] is None


def test_products_that_are_wrong_or_fail_are_named_and_not_timed(bandwidth: Any) -> None:
    def fail(weight: Any) -> Any:
        raise RuntimeError("no such instruction\nand more")

    right = products.KERNELS["cpu"]["float32"]
    double = products.Kernel(lambda weight: lambda x: 2 * right.prepare(weight)(x), torch.float32)
    kernels = {"right": right, "double": double, "fails": products.Kernel(fail)}
    cases = products.product_cases(["128x256"], [1, 3], kernels, 1, bandwidth, CPU)
    found = {(product.kernel, product.rows): product for product in measuring.all_of(cases)}
    assert len(found) == 6
    assert found["right", 3].bound_seconds == 128 * 256 * 4 / bandwidth.bound
    assert found["right", 3].seconds.median > 0
    assert found["double", 3].seconds is found["fails", 1].seconds is None
    assert found["double", 3].error == pytest.approx(1)
    assert found["fails", 1].error == "RuntimeError: no such instruction"


def test_contexts_answer_as_the_target(
    tiny_chain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = f"{tiny_chain} --contexts 90 --windows 8 --dtype float32 --max-new-tokens 8 --turns 1"
    text = written(contexts, words, tmp_path / "record.md", monkeypatch)
    table = text.partition("after 90 tokens:")[2].strip().splitlines()[2:]
    cells = {row.split("|")[1].strip(): row.split("|") for row in table}
    full = ["eagle2", "eagle2, window 8", "polybasic_full", "polybasic_full, window 8"]
    assert list(cells) == ["target", *full]
    assert {row[-2].strip() for row in cells.values()} == {"yes"}
    chain = load_chain(tiny_chain, dtype="float32", share_caches=False)
    plan = systems.system_plans(chain)["polybasic_full"]
    own = contexts.cache_bytes(chain, plan, 10)
    shared = contexts.cache_bytes(load_chain(tiny_chain, dtype="float32"), plan, 10)
    a_layer = 2 * 2 * 32 * 10 * 4
    assert (own, shared) == (5 * a_layer, 3 * a_layer), "two layers each, and the head's"


def test_memory_beyond_what_was_stated_is_a_failure(
    tiny_chain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[list[str], dict[str, str]]] = []
    peaks = iter([60, 60, 60, 170])

    def measured(script: str, words: list[str], **environment: str) -> Any:
        asked.append((words[-4:], environment))
        stated = {"kernels": "native", "dtype": "float32", "context_tokens": 40}
        stated |= {"staying_bytes": 50, "peak_bytes": 150}
        return {"stated": stated, "measured": {"staying_bytes": 40, "peak_bytes": next(peaks)}}

    monkeypatch.setattr(memory, "in_a_process", measured)
    words = f"{tiny_chain} --contexts 40 --dtypes float32"
    assert run(memory, words, monkeypatch) == 0
    asking = ["--dtype", "float32", "--measure", "40"]
    assert asked == [(asking, {}), (asking, {"POLYBASIC_KERNELS": "eager"})]
    assert run(memory, words, monkeypatch) == 1
    with pytest.raises(UserError, match="context out of range"):
        run(memory, f"{tiny_chain} --contexts 3", monkeypatch)


def test_command_line_names_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["/home/me/chain", "--record=/tmp/r.md", "--recipe", "/home/me/x.yaml", "--turns", "2"]
    monkeypatch.setattr(sys, "argv", ["x", *words])
    parser = command.options("A script.", "chain", "--turns")
    parser.add_argument("--recipe")
    shown = command.command_line("/somewhere/passes.py", parser.parse_args())
    expected = "python benchmarks/passes.py CHAIN --record=RECORD --recipe x.yaml --turns 2"
    assert shown == expected
