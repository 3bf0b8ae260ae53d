"""Writes a GGUF file as a directory that transformers, and so meshnet, can load: python convert_gguf.py GGUF FOLDER

For tests with real models. Weights are dequantized to float32 and rounded to bfloat16; names, shapes and the order of rows are
Hugging Face's. Needs `gguf` and numpy only: that the result is what transformers makes of the same file is checked once, by
`smollm2.py` and `gemma3.py`. Refuses what it does not know: an architecture, a pre-tokenizer, a kind of token.
"""

import json
import sys
from pathlib import Path

import numpy as np
from gguf import GGUFReader, dequantize

from gguf_tokenizer import tokenizer_of

# Names of a layer's tensors in GGUF and in Hugging Face's files.
LLAMA_LAYER = {
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
LAYER_NAMES = {
    "llama": LLAMA_LAYER,
    "gemma3": LLAMA_LAYER
    | {
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
}
OTHER_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def main(source, folder):
    reader = GGUFReader(source)
    facts = Facts({name: field.contents() for name, field in reader.fields.items()})
    if facts.architecture not in LAYER_NAMES:
        sys.exit(f"{source}: architecture {facts.architecture} is not one that this script knows")
    folder.mkdir(parents=True, exist_ok=True)
    tied = all(tensor.name != "output.weight" for tensor in reader.tensors)
    write_json(folder / "config.json", config_of(facts, tied))
    write_json(folder / "generation_config.json", special_ids(facts))
    write_json(folder / "tokenizer.json", tokenizer_of(facts))
    write_json(folder / "tokenizer_config.json", tokenizer_config_of(facts))
    write_safetensors(folder / "model.safetensors", [bf16_tensor(tensor, facts) for tensor in reader.tensors])


class Facts:
    """The metadata of a GGUF file."""

    def __init__(self, values):
        self.values = values
        self.architecture = values["general.architecture"]

    def model(self, name):
        return self.values[f"{self.architecture}.{name}"]

    def tokenizer(self, name):
        return self.values[f"tokenizer.ggml.{name}"]


def config_of(facts, tied):
    heads = facts.model("attention.head_count")
    hidden = facts.model("embedding_length")
    common = {
        "hidden_size": hidden,
        "intermediate_size": facts.model("feed_forward_length"),
        "num_hidden_layers": facts.model("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": facts.model("attention.head_count_kv"),
        "max_position_embeddings": facts.model("context_length"),
        "rms_norm_eps": shortest(facts.model("attention.layer_norm_rms_epsilon")),
        "rope_theta": shortest(facts.model("rope.freq_base")),
        "tie_word_embeddings": tied,
        "vocab_size": len(facts.tokenizer("tokens")),
        "dtype": "bfloat16",
        **special_ids(facts),
    }
    if facts.architecture == "llama":
        # The activation is the only one that this architecture has in GGUF.
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "head_dim": facts.values.get("llama.rope.dimension_count", hidden // heads),
            **common,
        }
    head_dim = facts.model("attention.key_length")
    # What GGUF leaves to the architecture: the activation, the local rope, every sixth layer full, and the scale of all but the
    # largest Gemma 3.
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "head_dim": head_dim,
        "query_pre_attn_scalar": head_dim,
        "rope_local_base_freq": 10000.0,
        "sliding_window": facts.model("attention.sliding_window"),
        "sliding_window_pattern": 6,
        **common,
    }


def special_ids(facts):
    names = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    return {name: facts.tokenizer(f"{ours}_token_id") for name, ours in names.items()}


def tokenizer_config_of(facts):
    tokens = facts.tokenizer("tokens")
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    template = facts.values.get("tokenizer.chat_template")
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": facts.model("context_length"),
        **{name: tokens[facts.tokenizer(f"{ours}_token_id")] for name, ours in names.items()},
        **({"chat_template": template} if template else {}),
    }


def bf16_tensor(tensor, facts):
    """Name, shape and the bits of a tensor."""
    values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
    part = tensor.name.removesuffix(".weight")
    if facts.architecture == "gemma3" and part.endswith("norm"):
        values = values - 1  # GGUF keeps 1 + w
    if not part.startswith("blk."):
        return f"{OTHER_NAMES[part]}.weight", values.shape, bf16(values)
    _, layer, part = part.split(".")
    if facts.architecture == "llama" and part in ("attn_q", "attn_k"):
        values = half_split(values, facts.model("attention.head_count" if part == "attn_q" else "attention.head_count_kv"))
    return f"model.layers.{layer}.{LAYER_NAMES[facts.architecture][part]}.weight", values.shape, bf16(values)


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
