"""Writes a GGUF file as a directory that transformers, and so meshnet, can load: python convert_gguf.py GGUF FOLDER

For tests with real models. Weights are dequantized to float32 and rounded to bfloat16; names, shapes and the order of rows are
Hugging Face's. Needs `gguf` and numpy only: that the result is what transformers makes of the same file is checked once, by
`smollm2.py`. Refuses what it does not know: an architecture, a pre-tokenizer, a kind of token.
"""

import json
import sys
from pathlib import Path

import numpy as np
from gguf import GGUFReader, dequantize

# The pre-tokenizers that `tokenizer.ggml.pre` names, as tokenizer.json spells them.
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
PRE_TOKENIZERS = {
    "smollm": {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, BYTE_LEVEL]},
}

# Values of `tokenizer.ggml.token_type`.
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OTHER_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def main(source, folder):
    reader = GGUFReader(source)
    facts = {name: field.contents() for name, field in reader.fields.items()}
    if facts["general.architecture"] != "llama":
        sys.exit(f"{source}: architecture {facts['general.architecture']} is not one that this script knows")
    folder.mkdir(parents=True, exist_ok=True)
    tied = all(tensor.name != "output.weight" for tensor in reader.tensors)
    write_json(folder / "config.json", config_of(facts, tied))
    write_json(folder / "generation_config.json", generation_config_of(facts))
    write_json(folder / "tokenizer.json", tokenizer_of(facts))
    write_json(folder / "tokenizer_config.json", tokenizer_config_of(facts))
    write_safetensors(folder / "model.safetensors", [bf16_tensor(tensor, facts) for tensor in reader.tensors])


def config_of(facts, tied):
    heads = facts["llama.attention.head_count"]
    hidden = facts["llama.embedding_length"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",  # the only one that this architecture has in GGUF
        "hidden_size": hidden,
        "intermediate_size": facts["llama.feed_forward_length"],
        "num_hidden_layers": facts["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": facts["llama.attention.head_count_kv"],
        "head_dim": facts.get("llama.rope.dimension_count", hidden // heads),
        "max_position_embeddings": facts["llama.context_length"],
        "rms_norm_eps": shortest(facts["llama.attention.layer_norm_rms_epsilon"]),
        "rope_theta": shortest(facts["llama.rope.freq_base"]),
        "tie_word_embeddings": tied,
        "vocab_size": len(facts["tokenizer.ggml.tokens"]),
        "dtype": "bfloat16",
        **generation_config_of(facts),
    }


def generation_config_of(facts):
    names = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    return {name: facts[f"tokenizer.ggml.{ours}_token_id"] for name, ours in names.items()}


def tokenizer_of(facts):
    pre = facts["tokenizer.ggml.pre"]
    if facts["tokenizer.ggml.model"] != "gpt2" or pre not in PRE_TOKENIZERS:
        sys.exit(f"tokenizer {facts['tokenizer.ggml.model']}, pre-tokenizer {pre}: not one that this script knows")
    tokens = facts["tokenizer.ggml.tokens"]
    kinds = facts["tokenizer.ggml.token_type"]
    if odd := set(kinds) - {NORMAL, CONTROL, USER_DEFINED}:
        sys.exit(f"tokens of the kinds {sorted(odd)} are not ones that this script knows")
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": id,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": kind == CONTROL,
            }
            for id, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
            if kind != NORMAL
        ],
        "normalizer": None,
        "pre_tokenizer": PRE_TOKENIZERS[pre],
        "post_processor": None,
        "decoder": BYTE_LEVEL,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: id for id, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in facts["tokenizer.ggml.merges"]],
        },
    }


def tokenizer_config_of(facts):
    tokens = facts["tokenizer.ggml.tokens"]
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": facts["llama.context_length"],
        **{name: tokens[facts[f"tokenizer.ggml.{ours}_token_id"]] for name, ours in names.items()},
        "chat_template": facts["tokenizer.chat_template"],
    }


def bf16_tensor(tensor, facts):
    """Name, shape and the bits of a tensor."""
    values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
    part = tensor.name.removesuffix(".weight")
    if not part.startswith("blk."):
        return f"{OTHER_NAMES[part]}.weight", values.shape, bf16(values)
    _, layer, part = part.split(".")
    heads = {"attn_q": facts["llama.attention.head_count"], "attn_k": facts["llama.attention.head_count_kv"]}.get(part)
    if heads:
        values = half_split(values, heads)
    return f"model.layers.{layer}.{LAYER_NAMES[part]}.weight", values.shape, bf16(values)


def half_split(rows, heads):
    """GGUF has the rows of a rotated pair side by side, Hugging Face half a head apart."""
    pairs = rows.reshape(heads, -1, 2, rows.shape[-1])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def bf16(values):
    """Rounded to the nearest bfloat16, ties to even."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")


def shortest(number):
    """What was written before it became a float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(number)))


def write_safetensors(path, tensors):
    header = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape, bits in tensors:
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [end, end := end + bits.nbytes]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for _, _, bits in tensors:
            file.write(bits.tobytes())


def write_json(path, value):
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
