"""Runs that are refused before any work."""

from contextlib import nullcontext

import pytest
from transformers import GPT2Config, GPT2LMHeadModel
from transformers import PreTrainedTokenizerFast as FastTokenizer

from polybasic.chain.base.errors import UserError
from polybasic.chain.base.processes.group import process_group
from polybasic.chain.base.processes.place import Place
from polybasic.train.run import training
from polybasic.train.run.training import train_head
from polybasic.train.settings import DraftSettings, HeadSettings
from tests.train.run.small_runs import DATA, SETTINGS


def test_other_architectures_are_refused(target, conversations, tmp_path):
    config = GPT2Config(vocab_size=300, n_embd=32, n_layer=1, n_head=2)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    FastTokenizer.from_pretrained(target).save_pretrained(tmp_path / "gpt2")
    with pytest.raises(UserError, match=r"without the Llama family's layout: .*gpt2"):
        train_head(tmp_path / "gpt2", conversations, DATA, SETTINGS, 0, tmp_path / "run")


def test_folder_without_weights_is_refused(conversations, tmp_path):
    with pytest.raises(UserError, match=r"no weights: \S+none"):
        train_head(tmp_path / "none", conversations, DATA, SETTINGS, 0, tmp_path / "run")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="no weights"):
        train_head(tmp_path / "empty", conversations, DATA, SETTINGS, 0, tmp_path / "run")


def test_processes_that_cannot_train_together_are_refused(
    target, conversations, tmp_path, monkeypatch
):
    given = (target, conversations, DATA, SETTINGS, 0, tmp_path / "run")
    with process_group():
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.setenv("RANK", "1")
        with pytest.raises(UserError, match=r"rank 0 of 1, RANK=1 WORLD_SIZE=2; start all"):
            train_head(*given)
    monkeypatch.setattr(training, "process_group", lambda: nullcontext(Place(0, 3)))
    with pytest.raises(UserError, match=r"evenly: train.batch_size = 4, processes 3; "):
        train_head(*given)


def test_settings_that_cannot_work_are_refused():
    with pytest.raises(ValueError, match="warmup_steps 2000 must be below num_steps 10"):
        HeadSettings(num_steps=10)
    with pytest.raises(ValueError, match="zero_stage 3 shards the target over several processes"):
        HeadSettings(zero_stage=3)
    assert HeadSettings(zero_stage=3, num_processes=2).batch_size == 4
    with pytest.raises(ValueError, match="batch_size 4 must be a multiple of num_processes 3"):
        HeadSettings(num_processes=3)
    with pytest.raises(ValueError, match="adapt: lora needs a ready head"):
        DraftSettings(adapt="lora")
    assert DraftSettings(adapt="lora", model="org/head").lora.rank == 16
