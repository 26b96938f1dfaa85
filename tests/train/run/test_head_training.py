"""Whole training runs of a tiny head, each in seconds."""

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from importlib.metadata import version

import pytest
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import LlamaForCausalLM

from polybasic.chain.base.errors import UserError
from polybasic.chain.base.processes.interruption import Interrupted, record_signals, signals_raise
from polybasic.chain.formats.lineage import weights_digest
from polybasic.train.data.conversations import load_conversations, split_conversations
from polybasic.train.engine import learning_rate_factor
from polybasic.train.head.acceptance import Acceptance
from polybasic.train.run import training
from polybasic.train.run.loop import HeadRun
from polybasic.train.run.training import train_head
from polybasic.train.settings import LoraSettings
from tests import forked
from tests.conftest import write_intermediate
from tests.train.run.small_runs import DATA, RUN, SETTINGS, TEMPLATE, metrics, write_target


@pytest.fixture(scope="module")
def trained(target, conversations, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "whole"
    return out, train_head(target, conversations, DATA, SETTINGS, 0, out)


def test_writes_a_head_in_eagles_layout(trained, target):
    out, summary = trained
    assert sorted(path.name for path in out.iterdir()) == [
        "config.json",
        "metrics.jsonl",
        "model.safetensors",
        "training.json",
    ]
    weights = load_file(out / "model.safetensors")
    assert set(weights) == {
        "embed_tokens.weight",
        "fc.weight",
        "fc.bias",
        *(f"layers.0.self_attn.{each}_proj.weight" for each in "qkvo"),
        *(f"layers.0.mlp.{each}_proj.weight" for each in ("gate", "up", "down")),
        "layers.0.post_attention_layernorm.weight",
    }
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    assert not weights["fc.bias"].any()
    model = LlamaForCausalLM.from_pretrained(target, dtype="auto")
    assert torch.equal(weights["embed_tokens.weight"], model.get_input_embeddings().weight)
    config = json.loads((out / "config.json").read_text())
    assert config["polybasic"] == {"target_sha256": weights_digest(target)}
    assert (config["num_hidden_layers"], config["rope_theta"]) == (1, 1234.0)
    record = json.loads((out / "training.json").read_text())
    assert record["summary"] == summary
    assert record["settings"] == SETTINGS.model_dump(mode="json")
    assert record["target_sha256"] == weights_digest(target)
    assert record["versions"]["torch"] == version("torch")


def test_metrics_of_every_step_and_evaluation(trained):
    out, summary = trained
    lines = metrics(out)
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == list(range(1, 13))
    assert all(len(line["agreement"]) == len(line["acceptance"]) == 3 for line in steps)
    assert all(0 < each < 1 for line in steps for each in line["acceptance"])
    assert steps[0]["learning_rate"] == pytest.approx(SETTINGS.learning_rate / 2)
    assert steps[-1]["feature_loss"] < 0.9 * steps[0]["feature_loss"]
    evaluations = {
        line["step"]: line["simulated_accepted_length"]
        for line in lines
        if "simulated_accepted_length" in line
    }
    assert list(evaluations) == [4, 8, 12]
    assert max(evaluations.values()) == evaluations[summary["best_step"]]
    assert summary["simulated_accepted_length"] == pytest.approx(
        max(evaluations.values()), abs=1e-4
    )
    assert summary["accepted_by_task"] == {"other": summary["simulated_accepted_length"]}


def test_finished_run_is_not_repeated(trained, target, conversations, capsys):
    out, summary = trained
    before = (out / "model.safetensors").stat().st_mtime_ns
    assert train_head(target, conversations, DATA, SETTINGS, 0, out) == summary
    assert "already trained" in capsys.readouterr().err
    assert (out / "model.safetensors").stat().st_mtime_ns == before


def adapted(trained, target, conversations, out, lora, **changes):
    """A run that starts from the trained head; its record, and its weights beside the start's."""
    ready, _ = trained
    settings = SETTINGS.model_copy(update={"num_steps": 4, "dtype": "float32", **changes})
    summary = train_head(target, conversations, DATA, settings, 0, out, start=ready, lora=lora)
    assert json.loads((out / "training.json").read_text())["summary"] == summary
    weights = (load_file(folder / "model.safetensors") for folder in (ready, out))
    return summary, *weights


def test_run_from_a_ready_head_begins_where_that_one_ended(
    trained, target, conversations, tmp_path, capsys
):
    summary, before, after = adapted(
        trained, target, conversations, tmp_path / "more", None, dtype="bfloat16"
    )
    assert summary["initial_accepted_length"] == trained[1]["simulated_accepted_length"]
    assert summary["simulated_accepted_length"] >= summary["initial_accepted_length"]
    evaluated = [line for line in metrics(tmp_path / "more") if "simulated_accepted_length" in line]
    assert [line["step"] for line in evaluated] == [0, 4]
    first, fresh = (
        next(line["feature_loss"] for line in metrics(folder) if "loss" in line)
        for folder in (tmp_path / "more", trained[0])
    )
    assert first < 0.9 * fresh
    assert before.keys() == after.keys()
    line = r"draft head: 4 of 4  loss .*  \d\.\d\d tokens/round  [\d,]+ tokens/s  0:00:00 left"
    assert re.search(line, capsys.readouterr().err)


@pytest.mark.parametrize(("lora", "dtype"), [(None, "float32"), (LoraSettings(), "bfloat16")])
def test_start_is_what_is_written_where_training_makes_it_worse(
    lora, dtype, trained, target, conversations, tmp_path
):
    out = tmp_path / "worse"
    summary, before, after = adapted(
        trained, target, conversations, out, lora, learning_rate=0.07, dtype=dtype
    )
    assert summary["best_step"] == 0
    assert summary["simulated_accepted_length"] == summary["initial_accepted_length"]
    assert all(torch.equal(after[name].float(), before[name].float()) for name in before)


def test_lora_alone_is_trained_and_is_merged(trained, target, conversations, tmp_path, monkeypatch):
    # whatever a longer run would find, what counts here is what the last step leaves
    monkeypatch.setattr("polybasic.train.run.loop.simulate", growing_acceptance())
    summary, before, after = adapted(
        trained, target, conversations, tmp_path / "lora", LoraSettings(rank=2)
    )
    assert summary["best_step"] == 4
    assert before.keys() == after.keys(), "merged: no key of an adapter is left"
    for name, tensor in before.items():
        difference = after[name] - tensor.float()
        is_matrix = name.endswith("proj.weight") or name == "fc.weight"
        rank = torch.linalg.matrix_rank(difference, rtol=1e-3) if tensor.dim() == 2 else 0
        assert rank == (2 if is_matrix else 0), name
        assert bool(difference.any()) == is_matrix, name
    config = json.loads((tmp_path / "lora" / "config.json").read_text())
    assert config["polybasic"] == {"target_sha256": weights_digest(target)}


def signal_in_step(monkeypatch, number, which):
    """Let this process get a signal in the midst of a step; returns the steps that were taken."""
    taken, loss_of = [], HeadRun._loss

    def loss_and_signal(run, batch):
        taken.append(run._state.step + 1)
        if len(taken) == number:
            os.kill(os.getpid(), which)
        return loss_of(run, batch)

    monkeypatch.setattr(HeadRun, "_loss", loss_and_signal)
    return taken


def test_lora_that_sigterm_stops_continues_to_the_same_bits(
    trained, target, conversations, tmp_path, monkeypatch
):
    changes = {"eval_every_steps": 1, "dtype": "bfloat16"}
    lora = LoraSettings(rank=2)
    whole, *_ = adapted(trained, target, conversations, tmp_path / "whole", lora, **changes)
    before = signal.getsignal(signal.SIGTERM)
    steps = signal_in_step(monkeypatch, 2, signal.SIGTERM)
    out = tmp_path / "stopped"
    with pytest.raises(
        Interrupted, match=r"^SIGTERM: step 2 of 4 is saved in \S+/step-\d{8}; "
    ) as caught:
        adapted(trained, target, conversations, out, lora, **changes)
    assert caught.value.exit_code == 143
    assert signal.getsignal(signal.SIGTERM) is before
    stopped, *_ = adapted(trained, target, conversations, out, lora, **changes)
    assert steps == [1, 2, 3, 4]
    assert stopped | {"seconds": 0} == whole | {"seconds": 0}
    first, second = (folder / "model.safetensors" for folder in (tmp_path / "whole", out))
    assert first.read_bytes() == second.read_bytes()


PACKED = SETTINGS.model_copy(
    update={
        "kind": "eagle3",
        "feature_loss_weight": 0.0,
        "token_loss": "total_variation",
        "draft_vocab_size": 64,
        "features": "offline",
        "pack": True,
        "num_steps": 5,
        "eval_every_steps": 2,
        "save_every_steps": 1,
        "keep_every_steps": 2,
        "log": "tensorboard",
    }
)
"""All that can be asked of a run, but for a head to start from."""


def test_second_signal_ends_at_once_where_no_launcher_does_that():
    which = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(each) for each in which]

    def interrupt_twice(second_ends_at_once):
        with record_signals(second_ends_at_once) as received:
            os.kill(os.getpid(), signal.SIGINT)
            assert received.number == signal.SIGINT
            os.kill(os.getpid(), signal.SIGINT)

    interrupt_twice(second_ends_at_once=False)
    with pytest.raises(KeyboardInterrupt):
        interrupt_twice(second_ends_at_once=True)
    with pytest.raises(Interrupted, match=r"^SIGTERM: what was whole is kept"), signals_raise():
        os.kill(os.getpid(), signal.SIGTERM)
    assert [signal.getsignal(each) for each in which] == before


def test_a_training_of_few_conversations_makes_their_features_alone(
    target, conversations, tmp_path, capfd
):
    changes = {"features": "offline", "num_conversations": 3, "num_steps": 4, "batch_size": 2}
    settings = SETTINGS.model_copy(update=changes)
    train_head(target, conversations, DATA, settings, 0, tmp_path / "few")
    assert "offline features of 3 conversations" in capfd.readouterr().err
    settings = settings.model_copy(update={"num_conversations": None})
    train_head(target, conversations, DATA, settings, 0, tmp_path / "all")
    assert "offline features of 16 conversations" in capfd.readouterr().err


def test_a_head_never_learns_held_out_conversations(target, conversations, tmp_path, monkeypatch):
    seen = {name: set() for name in ("BatchStream", "heldout_batches", "count_answer_tokens")}

    def watch(name, place):
        made = getattr(training, name)

        def watched(*given):
            seen[name] |= set(given[place]["id"])
            return made(*given)

        monkeypatch.setattr(training, name, watched)

    watch("BatchStream", 0)
    watch("heldout_batches", 1)
    watch("count_answer_tokens", 0)
    changes = {"num_steps": 4, "batch_size": 2, "draft_vocab_size": 64}
    settings = SETTINGS.model_copy(update=changes)
    train_head(target, conversations, DATA, settings, 0, tmp_path / "out")
    splits = split_conversations(load_conversations(conversations), DATA.num_heldout)
    training_ids, heldout_ids = (set(split["id"]) for split in splits)
    assert not training_ids & heldout_ids
    assert seen == {
        "BatchStream": training_ids,
        "heldout_batches": heldout_ids,
        "count_answer_tokens": training_ids,
    }


def test_packed_offline_eagle3_that_ctrl_c_stops_continues_to_the_same_bits(
    target, conversations, tmp_path, monkeypatch
):
    def train(out):
        given = {"command": "polybasic train", "recipe": {"name": "a"}}
        return train_head(target, conversations, DATA, PACKED, 0, out, provenance=given)

    whole = train(tmp_path / "whole")
    steps = signal_in_step(monkeypatch, 3, signal.SIGINT)
    out = tmp_path / "stopped"
    with pytest.raises(Interrupted, match=r"^SIGINT: step 3 of 5 is saved") as caught:
        train(out)
    assert caught.value.exit_code == 130
    checkpoints = out / "checkpoints"
    names = ["best", "step-00000002", "step-00000003"]
    assert sorted(path.name for path in checkpoints.iterdir()) == names
    for name, step in zip(names, (2, 2, 3), strict=True):
        run = json.loads((checkpoints / name / "run.json").read_text())
        assert (run["step"], run["provenance"]["command"]) == (step, "polybasic train")
        assert run["settings"] == PACKED.model_dump(mode="json")
        assert run["versions"]["torch"] == version("torch")
    best = load_file(checkpoints / "best" / "model.safetensors")
    assert train(out) | {"seconds": 0} == whole | {"seconds": 0}
    assert steps == [1, 2, 3, 4, 5]
    weights = load_file(out / "model.safetensors")
    assert weights.keys() == best.keys() >= {"midlayer.hidden_norm.weight", "lm_head.weight", "d2t"}
    assert (whole["best_step"] == 2) == all(torch.equal(weights[key], best[key]) for key in best)
    first, second = (folder / "model.safetensors" for folder in (tmp_path / "whole", out))
    assert first.read_bytes() == second.read_bytes()
    assert 0 < whole["draft_vocabulary_coverage"] <= 1
    assert "untrimmed_accepted_length" not in whole
    kept = sorted(path.name for path in checkpoints.iterdir())
    assert kept == ["step-00000002", "step-00000004", "step-00000005"]
    assert not (out / "features").exists(), "features of this run alone go with it"
    assert scalars(out / "tensorboard", "agreement/3").keys() == {1, 2, 3, 4, 5}
    assert scalars(out / "tensorboard", "simulated_accepted_length").keys() == {2, 4, 5}
    told_losses = {line["step"]: line["loss"] for line in metrics(out) if "loss" in line}
    assert scalars(out / "tensorboard", "loss") == pytest.approx(told_losses)


def scalars(folder, name):
    events = EventAccumulator(str(folder))
    events.Reload()
    return {event.step: event.value for event in events.Scalars(name)}


def test_trimmed_head_is_compared_with_itself_over_all_tokens(target, conversations, tmp_path):
    changes = {"num_steps": 4, "draft_vocab_size": 64}
    out = tmp_path / "run"
    summary = train_head(target, conversations, DATA, SETTINGS.model_copy(update=changes), 0, out)
    assert int(load_file(out / "model.safetensors")["t2d"].sum()) == 64
    assert 0 < summary["draft_vocabulary_coverage"] <= 1
    assert summary["untrimmed_accepted_length"] >= 1


def test_head_of_the_intermediate_learns_its_states(conversations, tmp_path):
    target, intermediate = write_target(tmp_path / "target", 128), tmp_path / "intermediate"
    write_intermediate(intermediate, target)
    changes = {"num_steps": 3, "feature_noise": 0.0}
    losses = {}
    for source in ("target", "intermediate"):
        settings = SETTINGS.model_copy(update={**changes, "features_from": source})
        out = tmp_path / f"of_{source}"
        train_head(target, conversations, DATA, settings, 0, out, intermediate=intermediate)
        losses[source] = metrics(out)[0]["loss"]
    assert losses["target"] == pytest.approx(losses["intermediate"], rel=0.1)
    assert losses["target"] != losses["intermediate"]
    record = json.loads((tmp_path / "of_intermediate" / "training.json").read_text())
    assert record["intermediate_sha256"] == weights_digest(intermediate)
    config = json.loads((tmp_path / "of_intermediate" / "config.json").read_text())
    assert config["polybasic"] == {"target_sha256": weights_digest(target)}
    with pytest.raises(UserError, match="no intermediate to learn from"):
        train_head(target, conversations, DATA, settings, 0, tmp_path / "without")
    sharded = settings.model_copy(update={"zero_stage": 3})
    with pytest.raises(UserError, match=r"features_from = intermediate, train\.zero_stage = 3"):
        train_head(target, conversations, DATA, sharded, 0, out, intermediate=intermediate)


def growing_acceptance():
    lengths = itertools.count(1)
    return lambda *_: Acceptance(float(next(lengths)), 1, [0.0], {})


def test_other_start_or_adapter_is_another_run(trained, target, conversations, tmp_path, capsys):
    out = tmp_path / "run"
    reported = []
    for lora in (None, None, LoraSettings(rank=2), LoraSettings(rank=2), LoraSettings(rank=3)):
        capsys.readouterr()
        adapted(trained, target, conversations, out, lora, num_steps=3)
        reported.append("already trained" in capsys.readouterr().err)
    assert reported == [False, True, False, True, False]


def test_tokenizer_of_another_folder_is_used_and_tells_runs_apart(
    target, conversations, tmp_path, capsys
):
    bare, tokenizer = tmp_path / "bare", tmp_path / "tokenizer"
    for folder, is_wanted in ((bare, False), (tokenizer, True)):
        folder.mkdir()
        for path in target.iterdir():
            if (path.name.startswith("token") or path.suffix == ".jinja") == is_wanted:
                shutil.copy(path, folder)
    settings = SETTINGS.model_copy(update={"num_steps": 3})
    out = tmp_path / "run"
    with pytest.raises(UserError, match="cannot load the target's tokenizer"):
        train_head(bare, conversations, DATA, settings, 0, out)
    train_head(bare, conversations, DATA, settings, 0, out, tokenizer=tokenizer)
    (tokenizer / "chat_template.jinja").write_text(TEMPLATE.replace("assistant\n", "helper\n"))
    capsys.readouterr()
    train_head(bare, conversations, DATA, settings, 0, out, tokenizer=tokenizer)
    assert "already trained" not in capsys.readouterr().err


def train_until_killed(target, conversations, out, step):
    signal_in_step(pytest.MonkeyPatch(), step, signal.SIGKILL)
    train_head(target, conversations, DATA, SETTINGS, 0, out)


@pytest.mark.proof
def test_killed_run_continues_to_the_same_bits(trained, target, conversations, tmp_path):
    out, log, whole = tmp_path / "killed", tmp_path / "log.txt", trained[0]
    exit_code = forked.run(train_until_killed, target, conversations, out, 8, log=log)
    assert exit_code == -signal.SIGKILL, log.read_text()
    assert not (out / "model.safetensors").exists()
    (checkpoint,) = (out / "checkpoints").glob("step-*")
    # anew, because DeepSpeed would talk where it is imported
    arguments = [target, conversations, DATA.model_dump_json(), SETTINGS.model_dump_json(), out]
    again = subprocess.run(
        [sys.executable, "-c", RUN, *map(str, arguments)],
        env={name: value for name, value in os.environ.items() if name != "DS_ACCELERATOR"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert again.returncode == 0, again.stderr
    assert again.stdout == "", "results go there, not DeepSpeed's chatter"
    assert "[WARNING]" not in again.stderr
    assert "[INFO]" not in again.stderr
    assert f"continuing from {checkpoint}" in "".join(again.stderr.split("\n"))
    first, second = (folder / "model.safetensors" for folder in (whole, out))
    assert first.read_bytes() == second.read_bytes()
    taken = [[line | {"tokens_per_second": 0} for line in metrics(each)] for each in (whole, out)]
    assert taken[0] == taken[1]


def test_other_settings_do_not_continue_an_interrupted_run(
    target, conversations, tmp_path, monkeypatch
):
    out = tmp_path / "run"
    signal_in_step(monkeypatch, 2, signal.SIGINT)
    with pytest.raises(Interrupted):
        train_head(target, conversations, DATA, SETTINGS, 0, out)
    kept = list((out / "checkpoints").iterdir())
    assert kept
    with pytest.raises(UserError, match="interrupted training with other settings"):
        train_head(target, conversations, DATA, SETTINGS, 1, out)
    assert list((out / "checkpoints").iterdir()) == kept


def broken(target, conversations, settings, out):
    with pytest.raises(UserError) as caught:
        train_head(target, conversations, DATA, settings, 0, out)
    assert not (out / "model.safetensors").exists()
    return str(caught.value)


def test_loss_that_is_not_finite_names_step_conversations_and_last_good_checkpoint(
    target, conversations, tmp_path
):
    settings = SETTINGS.model_copy(update={"learning_rate": 1e30, "save_every_steps": 1})
    reported = broken(target, conversations, settings, tmp_path / "run")
    where = r"step 2, conversations \d+(, \d+){3}; last good checkpoint: \S+/step-00000001; "
    assert re.match(f"loss is not finite: nan: {where}", reported)


def test_weights_that_are_not_finite_are_not_saved(target, conversations, tmp_path, monkeypatch):
    save = HeadRun._save

    def break_and_save(run):
        if run._state.step == 4:
            next(run._module.head.fc.parameters()).data[0, 0] = float("inf")
        return save(run)

    monkeypatch.setattr(HeadRun, "_save", break_and_save)
    settings, out = SETTINGS.model_copy(update={"save_every_steps": 2}), tmp_path / "run"
    reported = broken(target, conversations, settings, out)
    where = r"step 4, conversations \d+(, \d+){3}; last good checkpoint: \S+/step-00000002; "
    assert re.match(f"weights are not finite: {where}", reported)


def test_wandb_offline_gets_the_run(target, conversations, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    settings = SETTINGS.model_copy(update={"num_steps": 3, "log": "wandb"})
    train_head(target, conversations, DATA, settings, 0, tmp_path / "run")
    (recorded,) = (tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb")
    assert recorded.stat().st_size > 0
    assert len(metrics(tmp_path / "run")) == 4


def test_learning_rate_rises_then_falls_to_zero():
    factor = learning_rate_factor(4, 10)
    assert [factor(step) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert factor(4) == 1.0
    assert factor(9) == pytest.approx(1 / 6)
    assert factor(10) == 0
