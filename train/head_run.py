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
from polybasic.train.batches import Batch, BatchStream, step_generator
from polybasic.train.checkpoints import (
    RunState,
    head_weights,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from polybasic.train.engine import start_engine
from polybasic.train.head import DraftHead
from polybasic.train.losses import UnrolledLoss, unrolled_loss
from polybasic.train.metrics import MetricsLog, TrainingBar, start_wandb
from polybasic.train.settings import HeadSettings
from polybasic.train.target import Target


class LossModule(nn.Module):
    """What the engine runs: from a batch's features to the loss."""

    def __init__(self, head: DraftHead, settings: HeadSettings) -> None:
        super().__init__()
        self.head = head
        self._settings = settings

    def forward(
        self, batch: Batch, features: Tensor, lm_head: Tensor, generator: torch.Generator
    ) -> UnrolledLoss:
        """Rows 0 .. T-3 are read: the last one predicts the last token."""
        settings, dtype = self._settings, self.head.fc.weight.dtype
        features = features.to(dtype)
        inputs = features[:, :-2]
        if settings.feature_noise:
            noise = torch.rand(inputs.shape, generator=generator, device=inputs.device)
            inputs = inputs + ((2 * noise - 1) * settings.feature_noise).to(dtype)
        outputs = self.head.unroll(batch.token_ids[:, 1:-1], inputs, settings.unroll_steps)
        return unrolled_loss(
            outputs,
            features[:, 1:-1],
            lm_head.to(dtype),
            batch.is_assistant[:, 2:],
            settings.feature_loss_weight,
            settings.token_loss_weight,
        )


class HeadRun:
    """One training run: its engine, its state, its best weights so far."""

    def __init__(
        self,
        target: Target,
        batches: BatchStream,
        heldout: list[HeldoutBatch],
        settings: HeadSettings,
        seed: int,
        identity: str,
        out: Path,
    ) -> None:
        self._target, self._batches, self._heldout = target, batches, heldout
        self._settings, self._seed, self._out = settings, seed, out
        self._checkpoints = out / "checkpoints"
        self.module = LossModule(_new_head(target, settings, seed), settings).to(target.device)
        self._engine = start_engine(self.module, settings)
        self._state, self._best = RunState(identity), dict[str, Tensor]()
        resumed = latest_checkpoint(self._checkpoints)
        if resumed is not None:
            self._state, self._best = load_checkpoint(resumed, self._engine, identity)
            print(f"continuing from {resumed}", file=sys.stderr)

    def train(self) -> dict[str, Any]:
        """Run the steps that are left; returns the summary."""
        settings, state = self._settings, self._state
        wandb_run = None
        if settings.log == "wandb":
            wandb_run = start_wandb(
                self._out, state.identity[:16], settings.model_dump(mode="json")
            )
        log = MetricsLog(self._out / "metrics.jsonl", state.step, wandb_run)
        with TrainingBar("draft head", settings.num_steps, state.step) as bar:
            while state.step < settings.num_steps:
                self._step(log, bar)
                is_last = state.step == settings.num_steps
                if is_last or state.step % settings.eval_every_steps == 0:
                    self._evaluate(log, bar)
                if is_last or state.step % settings.save_every_steps == 0:
                    save_checkpoint(self._checkpoints, self._engine, state, self._best)
        if wandb_run is not None:
            wandb_run.finish()
        return {
            "simulated_accepted_length": round(state.best_accepted_length, 4),
            "accepted_by_depth": list(state.best_accepted_by_depth),
            "best_step": state.best_step,
            "loss": state.loss,
            "steps": state.step,
            "tokens": state.num_tokens,
            "seconds": round(state.seconds, 1),
            "parameters": sum(each.numel() for each in self._best.values()),
        }

    def export(self, path: Path) -> None:
        """Write the best weights under EAGLE's key names, with the embedding and a zero fc.bias."""
        weights = {name.removeprefix("head."): tensor for name, tensor in self._best.items()}
        embedding = self.module.head.embed_tokens.weight
        weights["embed_tokens.weight"] = embedding.detach().to("cpu").contiguous()
        # engines disagree on a missing bias: one leaves it at random values
        weights["fc.bias"] = torch.zeros_like(weights["fc.weight"][:, 0])
        with whole_file(path) as partial:
            save_file(weights, partial, metadata={"format": "pt"})

    def _step(self, log: MetricsLog, bar: TrainingBar) -> None:
        started = time.perf_counter()
        state, device = self._state, self._target.device
        batch = self._batches.batch(state.step)
        batch = Batch(batch.token_ids.to(device), batch.is_assistant.to(device), batch.num_tokens)
        features = self._target.features(batch.token_ids)
        noise = step_generator(self._seed, state.step, "noise", device)
        loss = self._engine(batch, features, self._target.lm_head, noise)
        learning_rate = self._engine.get_lr()[0]
        state.loss = loss.total.item()
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
        numbers = {
            "loss": state.loss,
            "feature_loss": loss.feature.item(),
            "token_loss": loss.token.item(),
            "agreement": [round(value, 4) for value in loss.agreement.tolist()],
            "learning_rate": learning_rate,
            "tokens_per_second": round(batch.num_tokens / seconds, 1),
        }
        log.write(state.step, numbers)
        bar.advance(state.loss, numbers["tokens_per_second"])

    def _evaluate(self, log: MetricsLog, bar: TrainingBar) -> None:
        started = time.perf_counter()
        settings, state = self._settings, self._state
        tree = TreeShape(
            settings.eval_tree_depth, settings.eval_tree_top_k, settings.eval_tree_rows
        )
        found = simulate(self.module.head, self._target.lm_head, self._heldout, tree)
        state.seconds += time.perf_counter() - started
        if not self._best or found.accepted_length > state.best_accepted_length:
            self._best = head_weights(self.module)
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


def _new_head(target: Target, settings: HeadSettings, seed: int) -> DraftHead:
    """A head with fresh float32 weights and the target's embedding."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        head = DraftHead(target.head_shape(settings.intermediate_size))
    with torch.no_grad():
        head.embed_tokens.weight.copy_(target.embedding)
    return head
