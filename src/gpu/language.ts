import { createGpu } from "./dawn.ts";

/** Whether WGSL has `dot4I8Packed`. That is up to its compiler, Dawn, and the same for every device. */
export const hasPackedDot = (): Promise<boolean> =>
  (known ??= createGpu().then((gpu) => gpu.wgslLanguageFeatures.has("packed_4x8_integer_dot_product")));

let known: Promise<boolean> | undefined;
