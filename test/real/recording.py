"""What `smollm2.py` and `gemma3.py` share: the check of a converted model, and transformers' greedy answers with their gaps."""

import hashlib
import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "fixtures"))
from made_with import made_with

NEW_TOKENS = 16


def record(name, gguf, folder, texts, prompts_of):
    """Writes `<name>.json`. `prompts_of(tokenizer)` gives for each prompt's name what is recorded of it, `prompt_ids` among that."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = prompts_of(tokenizer)
    check_conversion(gguf, folder, tokenizer, texts)
    models = {
        dtype: AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()
        for dtype in (torch.float32, torch.bfloat16)
    }
    answers = {key: {**prompt, **answer(models, tokenizer, prompt["prompt_ids"])} for key, prompt in prompts.items()}
    moved = torch.cat([found.pop("moved") for found in answers.values()])
    result = {
        "made_with": made_with(),
        "gguf_sha256": sha256(gguf),
        "model_sha256": sha256(folder / "model.safetensors"),
        "new_tokens": NEW_TOKENS,
        # How bfloat16 moves the gap between the two best tokens in transformers itself.
        "gap_noise": {"rms": round(moved.square().mean().sqrt().item(), 4), "max": round(moved.max().item(), 4)},
        "texts": {text: tokenizer(text).input_ids for text in texts},
        "answers": answers,
    }
    (HERE / f"{name}.json").write_text(json.dumps(result, ensure_ascii=False) + "\n", encoding="utf-8")
    for key, found in answers.items():
        print(f"{key}: {found['text']!r}, least gap {min(found['top2_gaps'])}")
    print("gap_noise", result["gap_noise"])


@torch.no_grad()
def answer(models, tokenizer, prompt):
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
        "ids": new.tolist(),
        "runners_up": second.tolist(),
        "text": tokenizer.decode(new, skip_special_tokens=True),
        "top2_gaps": [round(gap, 4) for gap in gaps[0].tolist()],
        "moved": (gaps[0] - gaps[1]).abs(),
    }


def at(logits, ids):
    return logits.gather(1, ids[:, None])[:, 0]


def check_conversion(gguf, folder, tokenizer, texts):
    """The converter's weights and ids are those that transformers reads from the GGUF file."""
    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    dequantized = GgufConfig(dequantize=True)
    theirs = AutoModelForCausalLM.from_pretrained(**source, quantization_config=dequantized, dtype=torch.bfloat16)
    ours = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).state_dict()
    for name, weight in theirs.state_dict().items():
        assert torch.equal(weight, ours[name]), f"{name} is not what transformers reads"
    reader = AutoTokenizer.from_pretrained(**source)
    for text in texts:  # transformers leaves away the BOS that the metadata asks for
        ids = tokenizer(text, add_special_tokens=False).input_ids
        assert ids == reader(text, add_special_tokens=False).input_ids, f"{text!r} has other ids"


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()
