"""One training run of a head: steps, evaluations, checkpoints, and its best weights."""

import math
import shutil
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from polybasic.chain.base.errors import UserError
from polybasic.chain.base.processes.coordinator import broadcast_from_first
from polybasic.chain.base.processes.group import (
    is_first_process,
    num_processes,
    process_index,
    sum_over_processes,
    wait_for_all,
)
from polybasic.chain.base.processes.interruption import (
    HANDLED_SIGNALS,
    Interrupted,
    ReceivedSignal,
    record_signals,
)
from polybasic.chain.base.progress import ProgressReport
from polybasic.chain.formats.files import whole_folder, write_json
from polybasic.chain.formats.head_kinds.table import HEAD_KINDS
from polybasic.train.data.batches import Batch, BatchStream, row_noise, step_generator
from polybasic.train.engine import start_engine
from polybasic.train.features.lm_head import LmHead
from polybasic.train.features.states import FeatureSource
from polybasic.train.head.acceptance import HeldoutBatch, TreeShape, simulate
from polybasic.train.head.eagle2 import DraftHead
from polybasic.train.head.files import write_head
from polybasic.train.head.loss_module import LossModule
from polybasic.train.head.losses import UnrolledLoss, step_weights
from polybasic.train.head.positions import PositionHead, choose_anchors, position_counts
from polybasic.train.head.scales import ChannelScales
from polybasic.train.head.start import trained_weights
from polybasic.train.head.steering import Steering
from polybasic.train.run.checkpoints import (
    RECORD_NAME,
    RunState,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from polybasic.train.run.metrics import MetricsLog, start_tracker
from polybasic.train.settings import HeadSettings

_BEST_NAME = "best"


@dataclass(frozen=True)
class Parts:
    """What a run trains, and on what.

    Attributes:
        head: with its weights of step 0.
        lm_head: the verifier's, on the device of the run.
        features: the verifier's, of the batches.
        batches: by step.
        heldout: what evaluations draft for; of use in the first process.
        scales: of the verifier's states, the same in all processes.
    """

    head: DraftHead
    lm_head: LmHead
    features: FeatureSource
    batches: BatchStream
    heldout: list[HeldoutBatch]
    scales: ChannelScales


class HeadRun:
    """One training run: its engine, its state, its best weights so far.

    All processes run it together. The first one evaluates and writes, hence knows the best
    weights; the others wait for it.

    Args:
        parts: of the run.
        settings: of the training.
        seed: of the noise.
        record: what is run: `identity`, `target_sha256` and whatever is to lie beside checkpoints.
        out: the working folder.
        is_random_at_first: otherwise there is an evaluation before the first step.
    """

    def __init__(
        self,
        parts: Parts,
        settings: HeadSettings,
        seed: int,
        record: dict[str, Any],
        out: Path,
        is_random_at_first: bool,
    ) -> None:
        self._parts, self._settings, self._seed = parts, settings, seed
        self._record, self._out = record, out
        self._is_random_at_first = is_random_at_first
        self._checkpoints = out / "checkpoints"
        self.tree = TreeShape(
            settings.eval_tree_depth, settings.eval_tree_top_k, settings.eval_tree_rows
        )
        self._device = parts.lm_head.weight.device
        self._scales = ChannelScales(*(each.to(self._device) for each in parts.scales))
        self._module = LossModule(parts.head, settings, self._scales.states).to(self._device)
        self._engine = start_engine(self._module, settings)
        identity = record["identity"]
        self._state, self._best = RunState(identity), dict[str, Tensor]()
        resumed = latest_checkpoint(self._checkpoints)
        if resumed is not None:
            self._state, self._best = load_checkpoint(resumed, self._engine, identity)
            print(f"continuing from {resumed}", file=sys.stderr)

    def train(self) -> dict[str, Any]:
        """Run the steps that are left; returns the summary, of use in the first process.

        Raises:
            UserError: the loss is not finite or has grown tenfold, or the disk is full.
            Interrupted: by SIGINT or SIGTERM, after the step under way, which is saved.
        """
        settings, state = self._settings, self._state
        saved = latest_checkpoint(self._checkpoints)
        with ExitStack() as opened:
            # alone, a second signal ends the process at once; others are ended by their launcher
            received = opened.enter_context(
                record_signals(second_ends_at_once=num_processes() == 1)
            )
            log = self._start_log() if is_first_process() else None
            if log is not None:
                opened.callback(log.finish)
            progress = opened.enter_context(
                ProgressReport("draft head", settings.num_steps, state.step)
            )
            if state.step == 0 and not self._is_random_at_first:
                self._evaluate(log, progress)
                state.initial_accepted_length = state.best_accepted_length
            is_last = state.step == settings.num_steps
            while not is_last:
                signal_number = self._step(log, progress, received)
                is_last = state.step == settings.num_steps
                if is_last or state.step % settings.eval_every_steps == 0:
                    self._evaluate(log, progress)
                    is_last |= broadcast_from_first(self._no_longer_gains)
                if signal_number or is_last or state.step % settings.save_every_steps == 0:
                    saved = self._save()
                if signal_number:
                    self._end(signal_number, saved)
        if received.number:
            self._end(received.number, saved)
        return self._summary()

    def export(self) -> None:
        """Write the best weights as a head into the working folder, in the first process."""
        self._write_head(self._out)

    def remove_checkpoints(self) -> None:
        """Remove what a finished run needs no more: all but what `keep_every_steps` keeps."""
        shutil.rmtree(self._checkpoints / _BEST_NAME, ignore_errors=True)
        if self._settings.keep_every_steps is None:
            shutil.rmtree(self._checkpoints)

    def _write_head(self, folder: Path) -> None:
        record, head = self._record, self._module.head
        trained_for: str = record["target_sha256"]
        if HEAD_KINDS[head.shape.kind].shares_cache:
            # of what it runs layers of
            trained_for = record.get("intermediate_sha256", trained_for)
        write_head(folder, head, self._best, trained_for, self._settings.dtype)

    def _summary(self) -> dict[str, Any]:
        state = self._state
        summary = {
            "simulated_accepted_length": round(state.best_accepted_length, 4),
            "accepted_by_depth": list(state.best_accepted_by_depth),
            "accepted_by_task": {
                task: round(length, 4) for task, length in state.best_accepted_by_task.items()
            },
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

    def _start_log(self) -> MetricsLog:
        settings, state = self._settings, self._state
        tracker = start_tracker(
            settings.log,
            self._out,
            state.identity[:16],
            settings.model_dump(mode="json"),
            state.step,
        )
        return MetricsLog(self._out / "metrics.jsonl", state.step, tracker)

    def _step(
        self, log: MetricsLog | None, progress: ProgressReport, received: ReceivedSignal
    ) -> int:
        """Train on one batch; returns a signal that any process received, or 0."""
        started = time.perf_counter()
        state = self._state
        batch = self._parts.batches.batch(state.step)
        loss = self._loss(batch)
        learning_rate = self._engine.get_lr()[0]
        means, signal_number = _over_processes(loss, received)
        state.follow(means.total)
        if not math.isfinite(state.loss):
            self._refuse(f"loss is not finite: {state.loss}", state.step + 1, batch)
        if state.has_exploded:
            grown = f"{state.smoothed_loss:.3g}, at first {state.first_loss:.3g}"
            self._refuse(f"loss has grown tenfold: {grown}", state.step + 1, batch)
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
                    "feature_loss": means.feature,
                    "token_loss": means.token,
                    "agreement": [round(value, 4) for value in means.agreement],
                    "acceptance": [round(value, 4) for value in means.acceptance],
                    "learning_rate": learning_rate,
                    "tokens_per_second": tokens_per_second,
                },
            )
        agreement = " ".join(f"{each:.2f}" for each in means.agreement)
        numbers = [f"loss {state.loss:.3f}", f"agreement {agreement}"]
        if state.accepted_length is not None:
            numbers.append(f"{state.accepted_length:.2f} tokens/round")
        progress.step("  ".join([*numbers, f"{tokens_per_second:,.0f} tokens/s"]))
        return signal_number

    def _loss(self, batch: Batch) -> UnrolledLoss:
        """Of this process's share, in units of which the mean over processes is the batch's."""
        settings, device, step = self._settings, self._device, self._state.step
        share = batch.share(process_index(), num_processes(), device)
        features = self._parts.features.of(step, share)
        shape = self._module.noise_shape(features)
        noise = torch.zeros(shape, device=device)
        if settings.feature_noise:
            noise = row_noise(shape, share.rows, self._seed, step, device)
            noise *= settings.feature_noise * self._scales.source
        head, is_label = self._parts.head, batch.is_assistant[:, 2:]
        generator, anchors = step_generator(self._seed, step, "anchors"), None
        if isinstance(head, PositionHead):
            anchors = choose_anchors(is_label, settings.anchor_share, generator)
            counts = position_counts(is_label, anchors, head.num_positions)
        else:
            if isinstance(head, Steering):
                size = len(is_label), 1
                anchors = torch.randint(settings.num_positions, size, generator=generator)
            counts = step_weights(is_label, settings.num_levels).sum(dim=(1, 2))
        if anchors is not None:
            anchors = anchors[list(share.rows)].to(device)
        token_counts = counts.to(device) / num_processes()
        return self._engine(share, features, self._parts.lm_head, noise, token_counts, anchors)

    def _refuse(self, what: str, step: int, batch: Batch) -> NoReturn:
        names = ", ".join(name for row in batch.conversation_ids for name in row)
        raise UserError(
            what,
            f"step {step}, conversations {names}; last good checkpoint: "
            f"{latest_checkpoint(self._checkpoints) or 'none'}",
            "lower train.learning_rate, or leave a broken conversation out, and start anew",
        )

    def _save(self) -> Path:
        state, settings = self._state, self._settings
        trained = [each for each in self._module.parameters() if each.requires_grad]
        if not all(bool(each.isfinite().all()) for each in trained):
            batch = self._parts.batches.batch(state.step - 1)
            self._refuse("weights are not finite", state.step, batch)
        return save_checkpoint(
            self._checkpoints,
            self._engine,
            state,
            self._best,
            self._record,
            settings.keep_every_steps,
        )

    def _end(self, signal_number: int, saved: Path | None) -> NoReturn:
        raise Interrupted(
            signal_number,
            f"step {self._state.step} of {self._settings.num_steps} is saved in {saved}; the same "
            "command goes on from there",
            is_saved=True,
        )

    def _evaluate(self, log: MetricsLog | None, progress: ProgressReport) -> None:
        if log is not None:
            self._simulate(log, progress)
        wait_for_all()

    def _no_longer_gains(self) -> bool:
        """Whether as many evaluations as `patience` have found nothing better than an earlier one;
        known in the first process."""
        settings, state = self._settings, self._state
        if settings.patience is None:
            return False
        steps = settings.patience * settings.eval_every_steps
        return state.step - state.best_step >= steps

    def _simulate(self, log: MetricsLog, progress: ProgressReport) -> None:
        started = time.perf_counter()
        state, parts = self._state, self._parts
        found = simulate(self._module.head, parts.lm_head, parts.heldout, self.tree)
        state.seconds += time.perf_counter() - started
        state.accepted_length = found.accepted_length
        if not self._best or found.accepted_length > state.best_accepted_length:
            self._best = trained_weights(self._module.head)
            state.best_step = state.step
            state.best_accepted_length = found.accepted_length
            state.best_accepted_by_depth = tuple(found.accepted_by_depth)
            state.best_accepted_by_task = found.by_task
            self._write_best()
        log.write(
            state.step,
            {
                "simulated_accepted_length": found.accepted_length,
                "accepted_by_depth": found.accepted_by_depth,
                "accepted_by_task": found.by_task,
                "rounds": found.num_rounds,
            },
        )
        progress.say(
            f"step {state.step}: {found.accepted_length:.2f} tokens a round, simulated over "
            f"{found.num_rounds} rounds (best {state.best_accepted_length:.2f} "
            f"at step {state.best_step}); drafts are right to depth 1, 2, 3, ... in "
            + " ".join(f"{share:.2f}" for share in found.accepted_by_depth),
        )

    def _write_best(self) -> None:
        """Keep the best head where others can load it while the run goes on."""
        with whole_folder(self._checkpoints / _BEST_NAME) as partial:
            self._write_head(partial)
            write_json(partial / RECORD_NAME, {**self._record, "step": self._state.step})


class _Means(NamedTuple):
    """Over the processes."""

    total: float
    feature: float
    token: float
    agreement: list[float]
    acceptance: list[float]


def _over_processes(loss: UnrolledLoss, received: ReceivedSignal) -> tuple[_Means, int]:
    """Losses averaged over the processes, and a signal that any of them received, or 0."""
    is_received = torch.tensor([float(received.number == each) for each in HANDLED_SIGNALS])
    parts = torch.stack((loss.total.detach(), loss.feature, loss.token))
    steps = torch.stack((loss.agreement, loss.acceptance)).flatten()
    own = torch.cat((parts.float(), steps.float(), is_received.to(parts.device)))
    total, feature, token, *found = (sum_over_processes(own) / num_processes()).tolist()
    num_steps = len(loss.agreement)
    means = _Means(total, feature, token, found[:num_steps], found[num_steps : 2 * num_steps])
    signals = [
        number
        for number, share in zip(HANDLED_SIGNALS, found[-len(HANDLED_SIGNALS) :], strict=True)
        if share
    ]
    return means, signals[-1] if signals else 0
