import weightBf16 from "../../shaders/lib/weight_bf16.wgsl" with { type: "text" };
import weightInt8 from "../../shaders/lib/weight_int8.wgsl" with { type: "text" };
import weightNf4 from "../../shaders/lib/weight_nf4.wgsl" with { type: "text" };
import type { Access } from "../gpu/kernel.ts";

/** How a weight lies on the device, and with it which library stands in front of a kernel that reads it. */
export type Encoding = "bf16" | "int8" | "nf4";

interface WeightLibrary {
  readonly source: string;
  /** What it binds behind the kernel's own. */
  readonly bindings: Readonly<Partial<Record<"scales", Access>>>;
  /** The overrides it declares. */
  readonly constants: readonly WeightConstant[];
}

type WeightConstant = "WEIGHT_STRIDE" | "COLUMNS";

export const WEIGHT_LIBRARIES: Readonly<Record<Encoding, WeightLibrary>> = {
  bf16: { source: weightBf16, bindings: {}, constants: ["WEIGHT_STRIDE"] },
  int8: { source: weightInt8, bindings: { scales: "read" }, constants: ["WEIGHT_STRIDE"] },
  nf4: { source: weightNf4, bindings: { scales: "read" }, constants: ["WEIGHT_STRIDE", "COLUMNS"] },
};

/** One kernel for each encoding. */
export const forEachEncoding = <K>(define: (encoding: Encoding) => K): Readonly<Record<Encoding, K>> => ({
  bf16: define("bf16"),
  int8: define("int8"),
  nf4: define("nf4"),
});

/**
 * The bindings and constants of a kernel behind a weight library. Every encoding takes the same ones, and those that an
 * encoding has no use for are left out when it is compiled and run.
 */
export const withWeight = <const B extends string, const C extends string>(
  encoding: Encoding,
  own: { bindings: Readonly<Record<B, Access>>; constants: readonly C[] },
) => ({
  bindings: { weight: "read", ...own.bindings, ...WEIGHT_LIBRARIES[encoding].bindings } as Readonly<
    Record<B | "weight" | "scales", Access>
  >,
  constants: [...WEIGHT_LIBRARIES[encoding].constants, ...own.constants] as readonly (C | WeightConstant)[],
});
