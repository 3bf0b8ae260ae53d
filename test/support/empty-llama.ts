import { type SizedTensor, writeEmptyCheckpoint } from "./empty-checkpoint.ts";

/** meta-llama/Meta-Llama-3-70B, by its config.json. */
const CONFIG = {
  model_type: "llama",
  hidden_size: 8192,
  intermediate_size: 28672,
  num_hidden_layers: 80,
  num_attention_heads: 64,
  num_key_value_heads: 8,
  vocab_size: 128256,
  max_position_embeddings: 8192,
  hidden_act: "silu",
  rms_norm_eps: 1e-5,
  rope_theta: 500000,
  tie_word_embeddings: false,
};

/** Its 141 GB, without a weight. */
export function writeEmptyLlama70B(folder: string): string {
  const { hidden_size: hidden, intermediate_size: inner, num_hidden_layers: layers, vocab_size: vocab } = CONFIG;
  const keys = 8 * 128;
  const layer = (index: number): SizedTensor[] => {
    const name = (rest: string) => `model.layers.${index}.${rest}.weight`;
    return [
      [name("input_layernorm"), hidden],
      [name("self_attn.q_proj"), hidden, hidden],
      [name("self_attn.k_proj"), keys, hidden],
      [name("self_attn.v_proj"), keys, hidden],
      [name("self_attn.o_proj"), hidden, hidden],
      [name("post_attention_layernorm"), hidden],
      [name("mlp.gate_proj"), inner, hidden],
      [name("mlp.up_proj"), inner, hidden],
      [name("mlp.down_proj"), hidden, inner],
    ];
  };
  return writeEmptyCheckpoint(folder, CONFIG, [
    ["model.embed_tokens.weight", vocab, hidden],
    ...Array.from({ length: layers }, (_, index) => layer(index)).flat(),
    ["model.norm.weight", hidden],
    ["lm_head.weight", vocab, hidden],
  ]);
}
