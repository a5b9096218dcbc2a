"""The model and the dataset of the example: `python prepare.py DIRECTORY`.

The model is makespan's embedded one (a small hybrid with random weights) with another tokenizer of the same size, in
which a token is a word. That makes the prompts of function-calling tasks a sixth as long, and it makes text and token
ids the same thing: what an environment was told can be turned back into the exact ids that the model generated.

The dataset is verl's usual parquet file. A row names its task as JSON in `extra_info.task`; `prompt` is there because
verl wants one, the agent gets its prompt from the environment.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections import Counter
from pathlib import Path

import pandas
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from makespan.envs.bfcl.environment import BfclEnvironment
from makespan.integrations.models import resolve
from makespan.rollout.environment import Message
from makespan.rollout.trajectory import Task

CATEGORY = "multi_turn_base"
TASKS_IN_CATEGORY = 200

TASKS = 16
"""Those with the shortest prompts are taken: training on a CPU pays for every token."""

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|> {{ message['role'] }} {{ message['content'] }} <|im_end|> {% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"
)


def write(directory: Path) -> None:
    """Writes `model/` and `train.parquet` under `directory`, unless they are there."""
    if (directory / "train.parquet").exists():
        return
    directory.mkdir(parents=True, exist_ok=True)
    tasks = _shortest_tasks()
    words = Counter(word for messages in tasks.values() for m in messages for word in m.content.split())
    model = directory / "model"
    shutil.copytree(resolve("embedded"), model, dirs_exist_ok=True)
    _write_word_tokenizer(model, words)
    _write_rows(directory / "train.parquet", tasks)


def _shortest_tasks() -> dict[str, tuple[Message, ...]]:
    """Task ids with the environment's first observation."""
    first = {}
    for number in range(TASKS_IN_CATEGORY):
        task = Task(task_id=f"{CATEGORY}_{number}", environment="bfcl")
        first[task.task_id] = BfclEnvironment().reset(task).messages
    by_length = sorted(first, key=lambda task_id: (sum(len(m.content.split()) for m in first[task_id]), task_id))
    return {task_id: first[task_id] for task_id in by_length[:TASKS]}


def _write_word_tokenizer(model: Path, words: Counter[str]) -> None:
    """A tokenizer with as many words as the embedded one has tokens, and the ids of its special tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    embedded = AutoTokenizer.from_pretrained(model)
    vocabulary = [embedded.pad_token, "<|im_start|>", embedded.eos_token, "<|unknown|>"]
    vocabulary += ["system", "user", "assistant", "tool"]
    frequent = sorted(words, key=lambda word: (-words[word], word))
    vocabulary += [word for word in frequent if word not in vocabulary][: len(embedded) - len(vocabulary)]
    vocabulary += [f"<|unused-{n}|>" for n in range(len(embedded) - len(vocabulary))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="<|unknown|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    # Only the end-of-turn token is special: any other word that the model says is a word to the environment, too.
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=embedded.eos_token,
        pad_token=embedded.eos_token,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    ).save_pretrained(model)


def _write_rows(path: Path, tasks: dict[str, tuple[Message, ...]]) -> None:
    rows = [
        {
            "data_source": "bfcl",
            "prompt": [{"role": m.role, "content": m.content} for m in messages if m.role == "user"],
            "ability": "function calling",
            "reward_model": {"style": "environment", "ground_truth": ""},
            "extra_info": {"index": index, "task": json.dumps({"task_id": task_id, "environment": "bfcl"})},
        }
        for index, (task_id, messages) in enumerate(tasks.items())
    ]
    pandas.DataFrame(rows).to_parquet(path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    write(parser.parse_args().directory)
