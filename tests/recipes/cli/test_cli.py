"""The command line: exit codes, what goes to which stream, and every refusal."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from polybasic.chain.base.errors import UserError
from polybasic.chain.base.processes.interruption import Interrupted
from polybasic.chain.base.processes.place import Place
from polybasic.chain.kernels.product_times import multiplies_fast
from polybasic.deploy import load_chain
from polybasic.deploy.planner.settings import BenchSettings, PlanSettings
from polybasic.recipes.cli import main as cli
from polybasic.recipes.cli.measure import _settings
from polybasic.recipes.cli.run import _num_processes
from polybasic.recipes.schema.loading import load_recipe, shipped_recipes
from tests import forked
from tests.conftest import PROVENANCE
from tests.recipes.command_line import call, refusal, with_plan
from tests.recipes.serving import served


def test_version_and_help() -> None:
    code, out, _ = call("--version")
    assert (code, out) == (0, "polybasic 0.1.0\n")
    for command in ("run", "train", "plan", "bench", "generate", "recipes"):
        code, out, _ = call(command, "--help")
        assert code == 0
        assert out.startswith("Usage: polybasic")
    assert "..." not in call("--help")[1].partition("Commands:")[2], "a summary is cut"


@pytest.mark.parametrize(
    "arguments", [["rnu", "base"], ["run"], ["run", "base", "--surely-unknown"], ["generate", "x"]]
)
def test_usage_errors_exit_with_2(arguments: list[str]) -> None:
    assert call(*arguments)[0] == 2


def test_unexpected_errors_exit_with_1_and_a_traceback(monkeypatch) -> None:
    def fail(name: str) -> None:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr("polybasic.recipes.schema.loading.find_recipe", fail)
    code, out, err = call("recipes", "show", "base")
    assert (code, out) == (1, "")
    assert err.splitlines()[-1] == "failed: ZeroDivisionError: division by zero"
    assert "Traceback" in err


def test_interrupt_exits_with_130(monkeypatch) -> None:
    def interrupt(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("polybasic.recipes.schema.loading.find_recipe", interrupt)
    assert call("recipes", "show", "base")[0] == 130


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_saved_interruption_tells_how_to_go_on(number: int, code: int, monkeypatch):
    def interrupt(name: str) -> None:
        raise Interrupted(number, "step 4 is saved; the same command goes on from there")

    monkeypatch.setattr("polybasic.recipes.schema.loading.find_recipe", interrupt)
    name = signal.Signals(number).name
    told = f"interrupted by {name}: step 4 is saved; the same command goes on from there\n"
    assert call("recipes", "show", "base") == (code, "", told)


def test_sigterm_ends_any_command_with_143(monkeypatch) -> None:
    def terminate(name: str) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr("polybasic.recipes.schema.loading.find_recipe", terminate)
    code, out, err = call("recipes", "show", "base")
    assert (code, out) == (143, "")
    assert err.startswith("interrupted by SIGTERM: ")


def test_processes_come_from_nproc_or_the_launcher(tmp_path, monkeypatch) -> None:
    found = []

    def run(recipe, out, command, only):
        found.append((recipe.train.num_processes, command))
        raise KeyboardInterrupt

    monkeypatch.setattr("polybasic.recipes.pipeline.run.run_recipe", run)
    monkeypatch.chdir(tmp_path)
    for words in (["--nproc", "8"], []):
        with pytest.raises(SystemExit):
            cli.main(["train", "base", *words])
    assert found == [(8, "polybasic train base --nproc 8"), (1, "polybasic train base")]
    assert [_num_processes(asked, Place(1, 4)) for asked in (None, 4)] == [4, 4]
    with pytest.raises(UserError, match=r"than the launcher has started: --nproc 2, .* 4; leave "):
        _num_processes(2, Place(1, 4))


def test_recipes_commands(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "base" in json.loads(call("recipes", "ls", "--json")[1])
    shown = call("recipes", "show", "qwen3-8b")[1]
    assert "base: " not in shown
    code, out, err = call("recipes", "cp", "qwen3-8b")
    assert (code, out) == (0, "qwen3-8b.yaml\n")
    assert "next: polybasic run qwen3-8b.yaml" in err
    assert Path("qwen3-8b.yaml").read_text("utf-8") == shown
    assert "file exists" in refusal("recipes", "cp", "qwen3-8b")
    assert call("recipes", "cp", "qwen3-8b", "--force")[0] == 0
    assert call("recipes", "validate", "qwen3-8b.yaml", "seed=3")[:2] == (
        0,
        "qwen3-8b.yaml: valid\n",
    )
    told = call("recipes", "validate")[1].splitlines()
    assert told == [f"{name}: valid" for name in shipped_recipes()]
    told = call("recipes", "validate", "qwen3-8b.yaml", "vicuna-7b")[1].splitlines()
    assert told == ["qwen3-8b.yaml: valid", "vicuna-7b: valid"]
    assert json.loads(call("recipes", "schema")[1])["properties"].keys() >= {"base", "name"}


def test_a_typo_is_refused_with_the_nearest_name(tmp_path) -> None:
    path = tmp_path / "typo.yaml"
    path.write_text("name: typo\ntrain:\n  lerning_rate: 1\n", "utf-8")
    for command in (["run"], ["train"], ["recipes", "validate"]):
        assert refusal(*command, str(path)) == (
            f"error: unknown key: train.lerning_rate ({path} line 3); "
            "did you mean train.learning_rate?"
        )


@pytest.mark.processor
def test_a_dry_run_prints_the_plan_and_writes_nothing(micro_recipe, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, _ = call("run", micro_recipe, "--dry-run")
    assert code == 0
    for word in (
        "data",
        "target",
        "draft",
        "intermediate",
        "chain",
        "report",
        "0.4 M",
        "estimate",
    ):
        assert word in out
    assert list(tmp_path.iterdir()) == []
    cores = "two AVX-512 cores" if multiplies_fast(torch.bfloat16) else "two AVX2 cores"
    assert " ".join(out.split()).endswith(
        f"{cores} (no CUDA device here): estimates from counted operations"
    )
    out = call("run", micro_recipe, "--dry-run", "--hardware", "h100-80gb")[1]
    assert "of device memory" in out
    assert "times are for h100-80gb, one H100 80 GB (SXM) (by --hardware)" in " ".join(out.split())
    out = call("quantize", micro_recipe, "--dry-run")[1]
    assert "intermediate" in out
    assert "draft" not in out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["run", "no.yaml"], "recipe not found: no.yaml"),
        (["run", "MICRO", "data.conversations=no.jsonl"], "data.conversations = no.jsonl"),
        (["run", "MICRO", "data.conversations=no.jsonl", "--dry-run"], "data.conversations"),
        (["run", "MICRO", "bench.prompts=no.jsonl"], "prompts not found: no.jsonl"),
        (["run", "MICRO", "--dry-run", "--hardware", "abacus"], "known: cpu, cpu-avx2, a100-80gb"),
        (["run", "MICRO", "--hardware", "cpu"], "hardware without --dry-run"),
        (["run", "MICRO", "target.model=nowhere"], "neither a folder nor a hub id"),
        (["run", "MICRO", "bench.repeats=0"], "bench.repeats = 0"),
        (
            ["run", "MICRO", "target.model=a/b", "target.chat_template=no.jinja"],
            "template not found",
        ),
        (["bench", "nowhere"], "nowhere"),
        (["bench", "nowhere", "--dtype", "int3"], "dtype = 'int3'"),
        (["bench", "nowhere", "--systems", "a"], "systems.0 = 'a'"),
        (["generate", "nowhere", "-p", "Hello"], "nowhere"),
        (["generate", "nowhere", "-p", "Hello", "--min-p", "2"], "min_p=2.0; use 0 to 1"),
        (["generate", "nowhere", "-p", "Hello", "--temperature", "-1"], "temperature=-1.0"),
        (["generate", "nowhere", "-p", "Hello", "--rule", "x"], "use one of coupled, block, token"),
        (
            ["generate", "nowhere", "-p", "Hello", "--rule", "block", "--verify"],
            "--verify with --rule block; leave --rule out",
        ),
        (["generate", "nowhere", "-p", "Hello", "--logit-bias", "42"], "write ID=VALUE"),
        (["generate", "nowhere", "-p", "Hello", "--logit-bias", "x=1"], "--logit-bias x=1"),
        (
            ["generate", "nowhere", "-p", "Hello", "--logit-bias", "4=1", "--logit-bias", "4=2"],
            "token named twice: --logit-bias 4=1 4=2",
        ),
        (["generate", "nowhere", "-p", "Hello", "--logit-bias", "4=101"], "use -100 to 100"),
        (["inspect", "nowhere"], "nowhere"),
        (["verify", "."], "not a chain"),
    ],
)
def test_refusals(arguments: list[str], told: str, micro_recipe, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert told in refusal(*(micro_recipe if word == "MICRO" else word for word in arguments))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("", "empty conversation file"),
        ('{"conversations": []}\nnot json\n', "line 2"),
        ('{"id": "a"}\n', "line 1"),
    ],
)
def test_bad_conversations_are_told_in_the_first_stage(
    content, told, micro_recipe, tmp_path
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(content, "utf-8")
    out = tmp_path / "out"
    code, _, err = call(
        "run", micro_recipe, f"data.conversations={path}", "data.num_heldout=1", "--out", str(out)
    )
    assert code == 2
    assert told in err.splitlines()[-1]
    assert str(path) in err.splitlines()[-1]
    assert [path.name for path in out.iterdir() if path.is_dir()] == []


def test_malformed_prompts_are_told_before_anything_runs(micro_recipe, tmp_path) -> None:
    path, out = tmp_path / "prompts.jsonl", tmp_path / "out"
    path.write_text('{"question_id": 1, "category": "qa", "turns": ["a"]}\n{\n', "utf-8")
    line = refusal("run", micro_recipe, f"bench.prompts={path}", "--out", str(out))
    assert f"{path} line 2" in line
    assert not out.exists()


def test_a_full_disk_is_told_before_the_start(micro_recipe, tmp_path, monkeypatch) -> None:
    full = shutil.disk_usage(tmp_path)._replace(free=1_000_000)
    monkeypatch.setattr("shutil.disk_usage", lambda path: full)
    line = refusal("run", micro_recipe, "--out", str(tmp_path / "out"))
    assert line.startswith("error: not enough disk: ")
    assert not (tmp_path / "out").exists()


def test_ctrl_c_stops_a_run_with_130_and_keeps_what_is_whole(micro_recipe, tmp_path) -> None:
    program = [sys.executable, "-m", "polybasic.recipes.cli.main"]
    command = [*program, "run", micro_recipe, "--out", "out"]
    with subprocess.Popen(
        command,
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as running:
        assert running.stderr is not None
        for line in running.stderr:
            if line.startswith("draft: starting"):
                os.kill(running.pid, signal.SIGINT)
                break
        running.communicate()
    assert running.returncode == 130
    assert (tmp_path / "out" / "target" / "stage.json").is_file()
    assert not (tmp_path / "out" / "draft").exists()


def test_doctor_names_what_matters() -> None:
    found = json.loads(call("doctor", "--json")[1])
    assert found["packages"]["torch"].startswith("2.13.0")
    assert set(found["extras"]) == {"train", "serve", "quantize", "gguf", "dev"}
    assert "GB" in found["free disk"]


def test_generate_has_an_option_for_every_setting(tiny_chain: Path) -> None:
    asked = ["generate", str(tiny_chain), "-p", "w5 w9 w2", "--dtype", "float32"]
    asked += ["--max-new-tokens", "30", "--json"]
    chain = load_chain(tiny_chain, dtype="float32")
    plain = chain.generate("w5 w9 w2", max_new_tokens=30).token_ids
    for options, settings in (
        (["--temperature", "0.9", "--top-k", "7", "--seed", "3"], {"top_k": 7}),
        (["--temperature", "0.9", "--top-p", "0.8", "--seed", "3"], {"top_p": 0.8}),
        (["--temperature", "0.9", "--min-p", "0.2", "--seed", "3"], {"min_p": 0.2}),
        (["--repetition-penalty", "1.5"], {"repetition_penalty": 1.5}),
        (["--presence-penalty", "2"], {"presence_penalty": 2.0}),
        (["--frequency-penalty", "2"], {"frequency_penalty": 2.0}),
        (
            ["--logit-bias", "11=9", "--logit-bias", "4=8.5", "--logit-bias", "63=-100"],
            {"logit_bias": {11: 9.0, 4: 8.5, 63: -100.0}},
        ),
    ):
        sampled = {"temperature": 0.9, "seed": 3} if "--seed" in options else {}
        code, out, err = call(*asked, *options)
        assert code == 0, err
        answer = json.loads(out)
        expected = chain.generate("w5 w9 w2", max_new_tokens=30, **settings, **sampled)
        assert answer["token_ids"] == expected.token_ids != plain
        assert answer["text"] == expected.text
        assert "generation_config.json" not in err
    stop = chain.tokenizer.decode(plain[5])
    out = call(*asked, "--stop", "never", "--stop", f" {stop}", "--members", "target")[1]
    answer = json.loads(out)
    assert answer["statistics"]["stopped_by"] == "stop_string"
    assert set(answer["statistics"]["forward_passes"]) == {"target"}
    assert answer["token_ids"] == plain[: plain.index(plain[5]) + 1]


def test_generate_compares_an_answer_with_the_targets_own(
    tiny_chain: Path, request: pytest.FixtureRequest
) -> None:
    asked = ["generate", str(tiny_chain), "-p", "w5 w9 w2", "--max-new-tokens", "30", "--verify"]
    sampled = [*asked, "--temperature", "0.9", "--top-p", "0.95"]
    for options in (asked, sampled, [*sampled, "--seed", "3", "--json"]):
        code, _, err = call(*options)
        assert code == 0, err
        assert "verified: identical to the target alone" in err.splitlines()[-1]
    assert "(seed 3)" in err
    drawn = call(*sampled)[2].splitlines()
    assert drawn[-2].rpartition("; seed ")[2] in drawn[-1], "the drawn seed is named"

    request.getfixturevalue("noise_of_another_seed")
    code, _, err = call(*sampled, "--seed", "3")
    assert code == 1
    assert "parts from the target's own (seed 3) at token" in err
    assert "rounding does not explain it" in err


def test_generate_says_what_the_checkpoint_decided(tiny_chain_parts, tmp_path: Path) -> None:
    path = tiny_chain_parts.target / "generation_config.json"
    defaults = {"do_sample": True, "temperature": 0.6, "top_k": 5, "repetition_penalty": 1.1}
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | defaults), "utf-8")
    tiny_chain_parts.package(tmp_path / "chain")
    asked = ["generate", str(tmp_path / "chain"), "-p", "w5", "--max-new-tokens", "4"]

    def said(*options: str) -> str:
        code, _, err = call(*asked, *options)
        assert code == 0, err
        line = err.splitlines()[-1]
        return line.partition("; by the checkpoint's generation_config.json: ")[2]

    assert said() == "repetition_penalty 1.1, temperature 0.6, top_k 5"
    assert said("--top-k", "0", "--repetition-penalty", "1") == "temperature 0.6"
    assert said("--temperature", "0") == "repetition_penalty 1.1"
    assert said("--temperature", "0", "--repetition-penalty", "1") == ""

    plan = {"temperature": 0, "max_new_tokens": 3, "dtype": "float32", "rule": "block"}
    recipe = {"name": "tiny", "plan": plan, "bench": {"temperature": 1}}
    provenance = PROVENANCE.model_copy(update={"recipe": recipe})
    made = tmp_path / "made"
    tiny_chain_parts.package(made, provenance=provenance)
    code, _, err = call("generate", made, "-p", "w5")
    assert code == 0, err
    assert err.splitlines()[-1].startswith("3 tokens in ")
    told = "; by the chain's recipe: temperature 0; by the checkpoint's generation_config.json: "
    assert err.splitlines()[-1].endswith(f"{told}repetition_penalty 1.1")
    settings = _settings(PlanSettings, made, {"max_new_tokens": 9})
    assert settings == PlanSettings(**(plan | {"max_new_tokens": 9}))
    assert _settings(BenchSettings, made, {}) == BenchSettings(temperature=1)


def test_a_plan_for_another_machine_is_told_on_stderr(tiny_chain: Path, tmp_path: Path) -> None:
    manifest = json.loads((tiny_chain / "chain.json").read_text("utf-8"))
    plan = {"hardware": "an abacus", "dtype": "float32", "temperature": 0, "seconds_per_token": 1}
    manifest["plans"] = [{**plan, "plan": manifest["plan"]}]
    del manifest["sha256"]
    (tiny_chain / "chain.json").write_text(json.dumps(manifest), "utf-8")
    asked, log = (
        ["generate", str(tiny_chain), "-p", "w5", "--max-new-tokens", "4"],
        tmp_path / "log",
    )
    exit_code = forked.run(cli.main, asked, log=log)
    assert exit_code == 0, log.read_text("utf-8")
    told = [line for line in log.read_text("utf-8").splitlines() if "an abacus" in line]
    assert len(told) == 1
    assert told[0].startswith("the chain's plans were measured on an abacus, not on ")
    assert told[0].endswith(f"; measure here: polybasic plan {tiny_chain}")


def test_prompts_of_a_url_are_fetched_into_the_chain(tiny_chain: Path, tmp_path) -> None:
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "none.jsonl").write_text("{}\n")
    for command, name in (("plan", "plan_prompts.jsonl"), ("bench", "prompts.jsonl")):
        with served(tmp_path / "files") as url:
            missing = refusal(command, str(tiny_chain), "--prompts", f"{url}/no.jsonl")
            assert f"--prompts = {url}/no.jsonl (404" in missing
            asked = [
                command,
                str(tiny_chain),
                "--dtype",
                "float32",
                "--prompts",
                f"{url}/none.jsonl",
            ]
            fetched = tiny_chain / "report" / name
            assert f"row without a prompt: {fetched} line 1" in refusal(*asked)
        with_plan(tiny_chain)
        given = [command, str(tiny_chain), "--dtype", "float32", "--prompts", "heldout"]
        assert "prompts not found: heldout; " in refusal(*given)


def test_commands_on_a_chain(micro_run: Path, tmp_path: Path) -> None:
    chain = str(micro_run / "chain")
    asked = ["-p", "What is two and two?", "--max-new-tokens", "8", "--dtype", "float32"]
    code, streamed, err = call("generate", chain, *asked)
    assert code == 0
    assert "tokens per target pass" in err.splitlines()[-1]
    assert call("generate", chain, *asked, "--no-stream")[1] == streamed
    answer = json.loads(call("generate", chain, *asked, "--json")[1])
    assert answer["text"] == streamed.rstrip("\n")
    assert answer["statistics"]["num_tokens"] == len(answer["token_ids"]) <= 8
    assert sum(answer["statistics"]["forward_passes"].values()) > 0

    sampled = [*asked, "--temperature", "1", "--seed", "5", "--json"]
    drawn = [json.loads(call("generate", chain, *sampled)[1]) for _ in range(2)]
    assert drawn[0]["token_ids"] == drawn[1]["token_ids"]

    too_long = refusal("generate", chain, "-p", "a b c " * 2000)
    assert "prompt does not fit the context" in too_long
    assert "top_p" in refusal("generate", chain, *asked, "--top-p", "2")

    description = json.loads(call("inspect", chain, "--json")[1])
    assert [member["name"] for member in description["members"]] == [
        "target",
        "intermediate",
        "draft",
    ]
    assert "made by: " in call("inspect", chain)[1]
    assert call("verify", chain)[0] == 0


def test_one_flipped_byte_is_found(micro_run: Path, tmp_path: Path) -> None:
    shutil.copytree(micro_run, tmp_path / "out")
    weights = tmp_path / "out" / "chain" / "draft" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    for command in (["verify"], ["generate", "-p", "Hello"]):
        line = refusal(*command, str(tmp_path / "out" / "chain"))
        assert "digest mismatch" in line
        assert str(weights) in line


@pytest.fixture(scope="module")
def chain(micro_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the micro run's chain, which commands may change."""
    return Path(shutil.copytree(micro_run, tmp_path_factory.mktemp("copy") / "out")) / "chain"


def test_plan_measures_writes_and_explains(chain: Path, tmp_path: Path) -> None:
    options = ["--num-prompts-per-task", "1", "--max-new-tokens", "6", "--temperature", "1"]
    measurements = tmp_path / "measurements.json"
    code, out, err = call("plan", chain, *options, "--measurements", measurements)
    assert code == 0, err
    assert "Best plan of each set of members" in out
    assert out.startswith("Run target")
    assert f"next: polybasic bench {chain}" in err.splitlines()[-1]
    measured = json.loads(measurements.read_text("utf-8"))
    assert [entry["rules"] for entry in measured] == [["coupled"], ["block", "token"]]
    assert {len(entry["traces"]) for entry in measured} == {6}
    code, out, err = call("plan", chain, *options, "--rule", "token")
    assert code == 0, err
    assert "rule token: no other was to be compared" in " ".join(out.split())
    assert "loads need the rule coupled and not token" in err
    manifest = json.loads((chain / "chain.json").read_text("utf-8"))
    greedy, planned = manifest["plans"]
    assert (greedy["temperature"], planned["temperature"]) == (0, 1)
    assert {each["plan"]["rule"] for each in [planned, *planned["others"]]} == {"token"}
    shown = " ".join(call("inspect", chain)[1].split())
    assert f"Plan for {planned['hardware']}, {planned['dtype']}, temperature 1" in shown
    assert f"measured on {planned['hardware']}, {greedy['dtype']}, temperature 0, " in shown
    assert "; predicted " in shown
    assert "temperature" in refusal("plan", chain, "--temperature=-1")
    assert "checkpoint not found" in refusal("plan", tmp_path / "nothing")


def test_bench_plans_first_on_another_machine_and_takes_its_own_settings(
    chain: Path, micro_run: Path, monkeypatch
) -> None:
    monkeypatch.setattr("polybasic.deploy.runtime.load.hardware_name", lambda *_: "another machine")
    options = ["--max-new-tokens", "4", "--repeats", "1", "--num-prompts-per-task", "1"]
    systems = ["--systems", "target,polybasic", "--dtype", "float32"]
    code, out, err = call("bench", chain, *options, *systems, "--json")
    assert code == 0, err
    told = ", not on another machine: plans first"
    assert err.index(told) < err.index("plan: costs of rounds")
    report = json.loads(out)
    assert set(report["systems"]) == {"target", "polybasic"}
    assert report["settings"]["max_new_tokens"] == 4
    beside = chain / "report" / "another-machine-float32-4-tokens"
    assert json.loads((beside / "report.json").read_text("utf-8")) == report
    assert "report.html" in err.splitlines()[-1]
    assert load_recipe(str(micro_run / "recipe.yaml")).bench.max_new_tokens == 16
