"""Where training starts from, and what ends it before its last step."""

import pytest

from polybasic.chain.base.errors import UserError
from polybasic.train.run.training import train_head
from tests.train.run.small_runs import DATA, SETTINGS, metrics


def test_training_ends_where_evaluations_gain_nothing(target, conversations, tmp_path):
    changes = {"learning_rate": 1e-12, "eval_every_steps": 2, "patience": 2}
    settings = SETTINGS.model_copy(update=changes)
    summary = train_head(target, conversations, DATA, settings, 0, tmp_path / "run")
    assert (summary["best_step"], summary["steps"]) == (2, 6)
    evaluated = [line["step"] for line in metrics(tmp_path / "run") if "rounds" in line]
    assert evaluated == [2, 4, 6]


def test_a_head_that_starts_as_its_targets_last_layer_is_evaluated_first(
    target, conversations, tmp_path
):
    settings = SETTINGS.model_copy(update={"start": "auto", "num_steps": 4, "warmup_steps": 1})
    summary = train_head(target, conversations, DATA, settings, 0, tmp_path / "run")
    assert [line["step"] for line in metrics(tmp_path / "run") if "rounds" in line] == [0, 4]
    assert summary["initial_accepted_length"] >= 1
    random = SETTINGS.model_copy(update={"num_steps": 4, "warmup_steps": 1})
    train_head(target, conversations, DATA, random, 0, tmp_path / "random")
    losses = [metrics(tmp_path / name)[1 if name == "run" else 0] for name in ("run", "random")]
    assert [line["step"] for line in losses] == [1, 1]
    assert losses[0]["token_loss"] < losses[1]["token_loss"]


def test_a_loss_that_grows_tenfold_ends_the_run(target, conversations, tmp_path):
    settings = SETTINGS.model_copy(update={"learning_rate": 1.0, "warmup_steps": 0})
    with pytest.raises(UserError, match=r"loss has grown tenfold: .*lower train.learning_rate"):
        train_head(target, conversations, DATA, settings, 0, tmp_path / "run")
