"""One training run of a head: steps, evaluations, checkpoints, and its best weights."""

import math
import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from polybasic.chain.errors import UserError
from polybasic.chain.files import whole_file
from polybasic.train.acceptance import HeldoutBatch, TreeShape, simulate
from polybasic.train.batches import Batch, BatchStream, Share, row_noise
from polybasic.train.checkpoints import (
    RunState,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from polybasic.train.engine import start_engine
from polybasic.train.head import DraftHead
from polybasic.train.head_start import new_head, trained_weights
from polybasic.train.losses import UnrolledLoss, step_weights, unrolled_loss
from polybasic.train.metrics import MetricsLog, TrainingBar, start_wandb
from polybasic.train.processes import (
    is_first_process,
    num_processes,
    process_index,
    sum_over_processes,
    wait_for_all,
)
from polybasic.train.settings import HeadSettings, LoraSettings
from polybasic.train.target import LmHead, Target


class LossModule(nn.Module):
    """What the engine runs: from the features of a share of a batch to the loss."""

    def __init__(self, head: DraftHead, settings: HeadSettings) -> None:
        super().__init__()
        self.head = head
        self._settings = settings

    def forward(
        self, share: Share, features: Tensor, lm_head: LmHead, noise: Tensor, token_counts: Tensor
    ) -> UnrolledLoss:
        """Rows 0 .. T-3 are read: the last one predicts the last token.

        Args:
            share: B conversations.
            features: [B, T, H], the target's.
            lm_head: the target's.
            noise: [B, T - 2, H], added to what is read.
            token_counts: [S], over how many tokens each step's mean is taken.
        """
        settings, dtype = self._settings, self.head.fc.weight.dtype
        features = features.to(dtype)
        inputs = features[:, :-2] + noise.to(dtype)
        outputs = self.head.unroll(share.token_ids[:, 1:-1], inputs, settings.unroll_steps)
        return unrolled_loss(
            outputs,
            features[:, 1:-1],
            lm_head.to(dtype),
            share.is_assistant[:, 2:],
            settings.feature_loss_weight,
            settings.token_loss_weight,
            token_counts,
        )


class HeadRun:
    """One training run: its engine, its state, its best weights so far.

    All processes run it together. The first one evaluates and writes, hence knows the best
    weights; the others wait for it.
    """

    def __init__(
        self,
        target: Target,
        batches: BatchStream,
        heldout: list[HeldoutBatch],
        settings: HeadSettings,
        seed: int,
        identity: str,
        out: Path,
        start: Path | None = None,
        lora: LoraSettings | None = None,
    ) -> None:
        self._target, self._batches = target, batches
        self._heldout = heldout if is_first_process() else []
        self._settings, self._seed, self._out = settings, seed, out
        self._is_random_at_first = start is None
        self._checkpoints = out / "checkpoints"
        shape = target.head_shape(settings.intermediate_size)
        head = new_head(shape, target.embedding, settings, seed, start, lora)
        self.module = LossModule(head, settings).to(target.device)
        self._engine = start_engine(self.module, settings)
        self._state, self._best = RunState(identity, num_processes()), dict[str, Tensor]()
        resumed = latest_checkpoint(self._checkpoints)
        if resumed is not None:
            self._state, self._best = load_checkpoint(resumed, self._engine, identity)
            print(f"continuing from {resumed}", file=sys.stderr)

    def train(self) -> dict[str, Any]:
        """Run the steps that are left; returns the summary, of use in the first process."""
        settings, state = self._settings, self._state
        log = self._start_log() if is_first_process() else None
        with TrainingBar("draft head", settings.num_steps, state.step) as bar:
            if state.step == 0 and not self._is_random_at_first:
                self._evaluate(log, bar)
                state.initial_accepted_length = state.best_accepted_length
            while state.step < settings.num_steps:
                self._step(log, bar)
                is_last = state.step == settings.num_steps
                if is_last or state.step % settings.eval_every_steps == 0:
                    self._evaluate(log, bar)
                if is_last or state.step % settings.save_every_steps == 0:
                    save_checkpoint(self._checkpoints, self._engine, state, self._best)
        if log is not None:
            log.finish()
        summary = {
            "simulated_accepted_length": round(state.best_accepted_length, 4),
            "accepted_by_depth": list(state.best_accepted_by_depth),
            "best_step": state.best_step,
            "loss": state.loss,
            "steps": state.step,
            "tokens": state.num_tokens,
            "seconds": round(state.seconds, 1),
            "parameters": sum(each.numel() for each in self._best.values()),
        }
        if state.initial_accepted_length is not None:
            summary["initial_accepted_length"] = round(state.initial_accepted_length, 4)
        return summary

    def export(self, path: Path) -> None:
        """Write the best weights with the embedding, and a zero fc.bias where they have none.

        Key names are EAGLE's. Call in the first process.
        """
        embedding = self.module.head.embed_tokens.weight
        weights = {
            **self._best,
            "embed_tokens.weight": embedding.detach().to("cpu").contiguous(),
        }
        # engines disagree on a missing bias: one leaves it at random values
        weights.setdefault("fc.bias", torch.zeros_like(weights["fc.weight"][:, 0]))
        with whole_file(path) as partial:
            save_file(weights, partial, metadata={"format": "pt"})

    def _start_log(self) -> MetricsLog:
        settings, state = self._settings, self._state
        wandb_run = None
        if settings.log == "wandb":
            wandb_run = start_wandb(
                self._out, state.identity[:16], settings.model_dump(mode="json")
            )
        return MetricsLog(self._out / "metrics.jsonl", state.step, wandb_run)

    def _step(self, log: MetricsLog | None, bar: TrainingBar) -> None:
        started = time.perf_counter()
        state = self._state
        batch = self._batches.batch(state.step)
        loss = self._loss(batch)
        learning_rate = self._engine.get_lr()[0]
        total, feature, token, *agreement = _over_processes(loss)
        state.loss = total
        if not math.isfinite(state.loss):
            raise UserError(
                "loss is not finite",
                f"step {state.step + 1}: {state.loss}; last good checkpoint: "
                f"{latest_checkpoint(self._checkpoints) or 'none'}",
                "lower train.learning_rate and start anew",
            )
        self._engine.backward(loss.total)
        self._engine.step()
        seconds = time.perf_counter() - started
        state.step += 1
        state.num_tokens += batch.num_tokens
        state.seconds += seconds
        tokens_per_second = round(batch.num_tokens / seconds, 1)
        if log is not None:
            log.write(
                state.step,
                {
                    "loss": state.loss,
                    "feature_loss": feature,
                    "token_loss": token,
                    "agreement": [round(value, 4) for value in agreement],
                    "learning_rate": learning_rate,
                    "tokens_per_second": tokens_per_second,
                },
            )
        bar.advance(state.loss, tokens_per_second)

    def _loss(self, batch: Batch) -> UnrolledLoss:
        """Of this process's share, in units of which the mean over processes is the batch's."""
        settings, device = self._settings, self._target.device
        share = batch.share(process_index(), num_processes(), device)
        features = self._target.features(share.token_ids)
        noise = torch.zeros_like(features[:, 2:])
        if settings.feature_noise:
            noise = settings.feature_noise * row_noise(
                noise.shape, share.rows, self._seed, self._state.step, device
            )
        counted = step_weights(batch.is_assistant[:, 2:], settings.unroll_steps)
        token_counts = counted.sum(dim=(1, 2)).to(device) / num_processes()
        return self._engine(share, features, self._target.lm_head, noise, token_counts)

    def _evaluate(self, log: MetricsLog | None, bar: TrainingBar) -> None:
        if log is not None:
            self._simulate(log, bar)
        wait_for_all()

    def _simulate(self, log: MetricsLog, bar: TrainingBar) -> None:
        started = time.perf_counter()
        settings, state = self._settings, self._state
        tree = TreeShape(
            settings.eval_tree_depth, settings.eval_tree_top_k, settings.eval_tree_rows
        )
        found = simulate(self.module.head, self._target.lm_head, self._heldout, tree)
        state.seconds += time.perf_counter() - started
        if not self._best or found.accepted_length > state.best_accepted_length:
            self._best = trained_weights(self.module.head)
            state.best_step = state.step
            state.best_accepted_length = found.accepted_length
            state.best_accepted_by_depth = tuple(found.accepted_by_depth)
        log.write(
            state.step,
            {
                "simulated_accepted_length": found.accepted_length,
                "accepted_by_depth": found.accepted_by_depth,
                "rounds": found.num_rounds,
            },
        )
        bar.say(
            f"step {state.step}: {found.accepted_length:.2f} tokens a round, simulated over "
            f"{found.num_rounds} rounds (best {state.best_accepted_length:.2f} "
            f"at step {state.best_step})"
        )


def _over_processes(loss: UnrolledLoss) -> list[float]:
    """Total, feature and token loss and each step's agreement, all means over the processes."""
    parts = (loss.total.detach(), loss.feature, loss.token)
    own = torch.cat((torch.stack(parts).float(), loss.agreement.float()))
    return (sum_over_processes(own) / num_processes()).tolist()
