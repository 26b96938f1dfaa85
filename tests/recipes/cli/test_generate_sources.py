"""`polybasic generate`: prompts from standard input and files, files of answers, chains by run."""

import io
import json
import shutil
from pathlib import Path

import pytest

import polybasic
from polybasic.chain.formats.files import partial_path
from polybasic.deploy import Chain
from tests.recipes.command_line import call, refusal

SHORT = ["--max-new-tokens", "6", "--dtype", "float32"]


def answer_to(prompt, chain):
    return polybasic.load_chain(chain, dtype="float32").generate(prompt, max_tokens=6).text


def prompts_file(folder, *texts):
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts), "utf-8")
    return path


def answers_in(path):
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


@pytest.mark.parametrize("dash", [("-p", "-"), ()])
def test_standard_input_is_read(dash: tuple[str, ...], tiny_chain: Path, monkeypatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("w5 w9 w2\n"))
    assert call("generate", tiny_chain, *dash, *SHORT)[:2] == (
        0,
        answer_to("w5 w9 w2", tiny_chain) + "\n",
    )
    monkeypatch.setattr("sys.stdin", io.StringIO("\n"))
    assert "empty prompt: standard input" in refusal("generate", tiny_chain, *dash)


def test_messages_come_from_a_file(tiny_chain: Path, tmp_path: Path) -> None:
    path, chain = tmp_path / "messages.json", tiny_chain
    path.write_text('{"role": "user"}')
    assert f"no list of messages: {path}" in refusal("generate", chain, "-f", path)
    path.write_text('[{"role": "user"}]')
    assert "role and content" in refusal("generate", chain, "-f", path, *SHORT)
    messages = [{"role": "user", "content": "w5 w9"}]
    path.write_text(json.dumps(messages))
    assert call("generate", chain, "-f", path, *SHORT)[1] == answer_to(messages, chain) + "\n"


def test_a_runs_folder_stands_for_its_chain(tiny_chain: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(tiny_chain, run / "chain")
    assert call("generate", run, "-p", "w5", *SHORT)[1] == answer_to("w5", tiny_chain) + "\n"
    (run / "chain" / "chain.json").write_text("{}")
    assert f"{run / 'chain'}" in refusal("inspect", run)
    (run / "chain" / "report").mkdir(exist_ok=True)
    assert "not a chain" in refusal("inspect", tmp_path / "run" / "chain" / "report")


def test_a_file_of_prompts_is_answered_and_gone_on_with(
    tiny_chain: Path, tmp_path: Path, monkeypatch
) -> None:
    texts, out = ["w5", "w9 w2", "w7"], tmp_path / "answers.jsonl"
    asked = ["generate", tiny_chain, "--prompts", prompts_file(tmp_path, *texts), "--out", out]
    generate, answered = Chain.generate, []

    def generate_two(chain, prompt, **options):
        if len(answered) == 2:
            raise KeyboardInterrupt
        answered.append(prompt)
        return generate(chain, prompt, **options)

    monkeypatch.setattr(Chain, "generate", generate_two)
    assert call(*asked, *SHORT)[0] == 130
    assert not out.exists()
    partial = partial_path(out)
    with partial.open("a") as file:
        file.write('{"question_id": "3", "ta')  # cut while it was written
    assert "other prompts or settings" in refusal(*asked, *SHORT, "--min-p", "0.5")
    answered.pop()
    code, said, err = call(*asked, *SHORT)
    assert (code, said) == (0, ""), err
    assert "answered 1 prompt;" in err
    assert answered == ["w5", "w7"], "the second one's answer was kept"
    monkeypatch.undo()
    assert [row["answers"] for row in answers_in(out)] == [
        [answer_to(text, tiny_chain)] for text in texts
    ]
    assert [row["prompts"] for row in answers_in(out)] == [[text] for text in texts]
    assert not partial.exists()
    assert f"answers are there: {out}" in refusal(*asked, *SHORT)


@pytest.mark.parametrize(
    ("given", "refused"),
    [
        ([], "no single prompt: generate; give one of --prompt, --file, --prompts, or pipe"),
        (["-p", "w5", "-f", "x.json"], "no single prompt: --prompt and --file"),
        (["--prompts", "x.jsonl"], "give --out FILE as well"),
        (["-p", "w5", "--out", "x.jsonl"], "give --prompts FILE as well"),
        (["--prompts", "x.jsonl", "--out", "y.jsonl"], "prompts not found: x.jsonl"),
        (["--prompts", "x.jsonl", "--out", "y.jsonl", "--verify"], "of a single answer: --verify"),
    ],
)
def test_sources_that_cannot_be_are_refused(given, refused, tiny_chain, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    assert refused in refusal("generate", tiny_chain, *given)
