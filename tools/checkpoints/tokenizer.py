"""Train the byte-level BPE tokenizer that all test checkpoints share.

All 256 bytes are in the vocabulary, so any text can be encoded. Digits are split one by one and the letters of quoted
words are never merged: arithmetic and spelling then do not depend on how a number or word happens to be cut up.
"""

from __future__ import annotations

import json
import random
import re
from itertools import islice
from pathlib import Path

from task import SYSTEM_PROMPTS, Problem, ask, problems
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 512
PAD, EOS = "<|pad|>", "<|endoftext|>"
SYSTEM, USER, ASSISTANT = "<|system|>", "<|user|>", "<|assistant|>"

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|' + message['role'] + '|>' + (message['content'] | trim) -}}"
    "{%- if message['role'] == 'assistant' -%}{{- eos_token -}}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


def _visible(problem: Problem) -> str:
    """The question with a digit for every quoted word, so that no merge of its letters is learned."""
    return re.sub(r'"[A-Z]+"', '"0"', ask(problem.question))


def build_tokenizer(seed: int = 0, samples: int = 20000) -> PreTrainedTokenizerFast:
    """Train the tokenizer on the training split; the same seed gives the same tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[PAD, EOS, SYSTEM, USER, ASSISTANT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = [_visible(problem) for problem in islice(problems(random.Random(seed), heldout=False), samples)]
    tokenizer.train_from_iterator([*texts, *SYSTEM_PROMPTS * 10], trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=EOS,
        pad_token=PAD,
        additional_special_tokens=[SYSTEM, USER, ASSISTANT],
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, directory: Path) -> None:
    """Save under the class name that every transformers release knows, not the newest alias of it."""
    tokenizer.save_pretrained(directory)
    path = directory / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
