"""What a head is worth for a fine-tuned target: as it is, adapted by a LoRA, or trained anew.

    python benchmarks/adapters.py RUN [--num-steps 100] [--json FILE]

RUN is the folder of a finished `polybasic run recipes/tiny.yaml`. Its target is fine-tuned by a
LoRA to write the answers in capitals. Then `polybasic train` runs twice on the merged target: with
the run's own head, which a LoRA adapts, and from random weights for as many steps. Accepted lengths
are simulated along the merged target's answers to held-out conversations.
"""

import argparse
import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from record import header, write_record
from rich.progress import track
from transformers import AutoModelForCausalLM, AutoTokenizer

from polybasic.chain.errors import UserError
from polybasic.chain.formats.files import read_json
from polybasic.recipes.pipeline.run import run_recipe
from polybasic.recipes.schema.loading import load_recipe
from polybasic.train.data.batches import collate
from polybasic.train.data.chat import encode_conversation

FINE_TUNING_STEPS, FINE_TUNING_ROWS, MAX_TOKENS = 60, 8, 256
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--num-steps", type=int, default=100, help="of training a head")
    parser.add_argument("--json", type=Path, help="write the record here")
    arguments = parser.parse_args()
    run = arguments.run.resolve()
    for name in ("target", "draft", "data"):
        if not (run / name / "stage.json").is_file():
            raise UserError("not a finished run", f"{run} (no {name} in it)", "run tiny.yaml first")
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        _write_in_capitals(run / "data" / "conversations.jsonl", scratch / "capitals.jsonl")
        _fine_tune(run / "target", scratch / "capitals.jsonl", scratch / "adapter")
        adapted = _train(run, scratch, arguments.num_steps, f"draft.model={run / 'draft'}")
        anew = _train(run, scratch, arguments.num_steps, "draft.model=train")
    lengths = {
        "head as it is": adapted["initial_accepted_length"],
        f"adapted by a LoRA, {adapted['best_step']} steps": adapted["simulated_accepted_length"],
        f"trained anew, {anew['best_step']} steps": anew["simulated_accepted_length"],
    }
    before = read_json(run / "draft" / "training.json", "training record")["summary"]
    print(f"{before['simulated_accepted_length']:.2f} tokens a round on the target that it is for")
    for name, length in lengths.items():
        print(f"{length:.2f} tokens a round on the fine-tuned target: {name}")
    content = {
        "before_fine_tuning": before["simulated_accepted_length"],
        "accepted_length": lengths,
        "seconds": {"lora": adapted["seconds"], "anew": anew["seconds"]},
    }
    places = {arguments.run: "RUN", arguments.json: "FILE"}
    write_record(arguments.json, header("adapters", torch.device("cpu"), places), content)


def _write_in_capitals(source: Path, out: Path) -> None:
    lines = []
    for line in source.read_text("utf-8").splitlines():
        row = json.loads(line)
        for turn in row["conversations"]:
            if turn["from"] == "gpt":
                turn["value"] = turn["value"].upper()
        lines.append(json.dumps(row, ensure_ascii=False))
    out.write_text("\n".join(lines) + "\n", "utf-8")


def _fine_tune(target: Path, conversations: Path, out: Path) -> None:
    """Train a LoRA on the assistant's tokens."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(target)
    rows = [json.loads(line)["conversations"] for line in conversations.open(encoding="utf-8")]
    chosen = random.Random(0).sample(rows, FINE_TUNING_STEPS * FINE_TUNING_ROWS)
    roles = {"system": "system", "human": "user", "gpt": "assistant"}
    messages = [
        [{"role": roles[turn["from"]], "content": turn["value"]} for turn in row] for row in chosen
    ]
    base = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    model = get_peft_model(base, LoraConfig(r=16, lora_alpha=32, target_modules=list(LINEARS)))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=2e-3, weight_decay=0.0)
    for step in track(range(FINE_TUNING_STEPS), "fine-tune the target"):
        part = messages[step * FINE_TUNING_ROWS : (step + 1) * FINE_TUNING_ROWS]
        batch = collate([encode_conversation(tokenizer, each, MAX_TOKENS) for each in part])
        labels = batch.token_ids.masked_fill(~batch.is_assistant, -100)
        loss: Any = model(input_ids=batch.token_ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(out)


def _train(run: Path, scratch: Path, num_steps: int, head: str) -> dict[str, Any]:
    """The summary of the head that `polybasic train` makes for the merged target."""
    overrides = [
        f"target.model={run / 'target'}",
        f"target.adapter={scratch / 'adapter'}",
        f"data.conversations={scratch / 'capitals.jsonl'}",
        f"train.num_steps={num_steps}",
        f"train.eval_every_steps={num_steps}",
        f"train.save_every_steps={num_steps}",
        head,
        *(["draft.adapt=lora"] if not head.endswith("=train") else []),
    ]
    out = scratch / ("anew" if head.endswith("=train") else "adapted")
    workspace = run_recipe(load_recipe("tiny", overrides), out, "polybasic train", only=("draft",))
    record = workspace.record("draft")
    assert record is not None
    return record.summary


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
