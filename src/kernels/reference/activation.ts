import type { Activation } from "../activation.ts";
import { erfc } from "./erfc.ts";

export function activation(name: Activation, x: number): number {
  switch (name) {
    case "gelu_tanh": // x/2 (1 + tanh z) = x sigmoid(2z), which keeps its digits where tanh z is nearly -1
      return x * sigmoid(2 * Math.sqrt(2 / Math.PI) * (x + 0.044715 * x ** 3));
    case "gelu_erf": // x/2 (1 + erf(x/√2))
      return (x / 2) * erfc(-x / Math.SQRT2);
    case "quick_gelu":
      return x * sigmoid(1.702 * x);
    case "silu":
      return x * sigmoid(x);
    case "relu":
      return Math.max(x, 0);
  }
}

const sigmoid = (x: number): number => 1 / (1 + Math.exp(-x));
