import { bf16ArrayToF32, convertToBf16, type FloatDtype, indexOfNonFinite } from "../../quant/bf16.ts";
import { RangeReader } from "../../safetensors/range-reader.ts";
import type { LoadPlan } from "../../weights/plan.ts";

/** Values that are read at a time. */
const SCAN_VALUES = 2 ** 18;
const VALUE_BYTES: Readonly<Record<FloatDtype, number>> = { F32: 4, F16: 2, BF16: 2 };

/**
 * Every weight that holds NaN or infinity, or what is infinite as bfloat16: a kernel may make anything of it. Weights that
 * the checkpoint keeps in another type are left to what they compute.
 */
export function brokenWeights({ weights }: LoadPlan): string[] {
  using reader = new RangeReader();
  const problems: string[] = [];
  const values = new Uint16Array(SCAN_VALUES);
  for (const { source } of weights) {
    if (!isFloat(source.dtype)) continue;
    const bytes = VALUE_BYTES[source.dtype];
    const count = (source.end - source.begin) / bytes;
    for (let first = 0; first < count; first += SCAN_VALUES) {
      const some = values.subarray(0, Math.min(SCAN_VALUES, count - first));
      const raw = new Uint8Array(some.length * bytes);
      reader.read(source.file, source.begin + first * bytes, raw);
      convertToBf16(source.dtype, raw, some);
      const at = indexOfNonFinite(some);
      if (at < 0) continue;
      const [value] = bf16ArrayToF32(some.subarray(at, at + 1));
      const where = `at element ${first + at}${ofLayer(source.name)}`;
      problems.push(`${source.file.name}: tensor ${source.name} holds ${value} as bfloat16, ${where}`);
      break;
    }
  }
  return problems;
}

const isFloat = (dtype: string): dtype is FloatDtype => Object.hasOwn(VALUE_BYTES, dtype);

/** The first number in a tensor's name is its layer; an expert's comes after it. */
function ofLayer(name: string): string {
  const [, layer] = /\.(\d+)\./.exec(`.${name}`) ?? [];
  return layer === undefined ? "" : `, in layer ${layer}`;
}
