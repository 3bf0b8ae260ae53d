import type { ActivationName } from "../nn/index.ts";
import type { ConfigReader } from "./config.ts";

/** The functions by transformers' names (`activations.py`). */
const ACTIVATIONS = {
  gelu_new: "gelu_tanh",
  gelu_fast: "gelu_tanh",
  gelu_accurate: "gelu_tanh",
  gelu_python_tanh: "gelu_tanh",
  gelu_pytorch_tanh: "gelu_tanh",
  gelu: "gelu_erf",
  gelu_python: "gelu_erf",
  quick_gelu: "quick_gelu",
  silu: "silu",
  swish: "silu",
  relu: "relu",
} as const satisfies Record<string, ActivationName>;

/** The activation that a key of the configuration names. An unknown one is refused, never guessed. */
export function readActivation(json: ConfigReader, key: string, fallback: keyof typeof ACTIVATIONS): ActivationName {
  const name = json.text(key, fallback);
  if (Object.hasOwn(ACTIVATIONS, name)) return ACTIVATIONS[name as keyof typeof ACTIVATIONS];
  throw json.refuse(
    `${key} "${name}" is not an activation that meshnet knows`,
    `known are ${Object.keys(ACTIVATIONS).join(", ")}`,
  );
}
