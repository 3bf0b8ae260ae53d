import type { Device } from "../gpu/device.ts";
import type { PipelineCache } from "../gpu/kernel.ts";
import type { ElementType, Tensor } from "../gpu/tensor.ts";
import type { ExpertStack, Matrix } from "./matrix.ts";

/**
 * A module before there is a device: what it needs, as plain data. The load plan adds these up, and `build` turns the
 * same object into something that runs, so what was promised is what is loaded.
 */
export interface ModuleSpec<M> {
  readonly weights: readonly WeightSpec[];
  readonly temporaries: readonly TemporarySpec[];
  build(context: BuildContext): Promise<M>;
}

/** A parameter as the kernels want it. */
export interface WeightSpec {
  /** The names under which a checkpoint may keep it, in order, without the family's prefix. */
  readonly names: readonly string[];
  /** `matrix`: [rows, columns] in the module's encoding. `vector`: [columns] in float32 that holds bfloat16 values. */
  readonly kind: "matrix" | "vector";
  readonly rows: number;
  readonly columns: number;
  /** The file keeps a matrix as [columns, rows]: GPT-2's Conv1D. */
  readonly storedTransposed: boolean;
  /** Whether bitsandbytes would quantize it: the linear layers, but for the head. */
  readonly quantizable: boolean;
  /** False: it stays as its file has it, although it is quantizable. Default: true. */
  readonly isQuantizedAtLoad?: boolean;
  /** A pass reads one row of it per token, not the whole: an embedding. */
  readonly gathered: boolean;
  /** Where the matrix is one expert's: the stack that it lies in on the device, with those of the layer's other experts. */
  readonly stack?: StackPlace;
  /** Where a matrix has to be split, it is split at multiples of so many rows. Default: 1. */
  readonly rowsTogether?: number;
  /** A vector that is float32 in the file and stays so. */
  readonly keepsF32?: boolean;
}

export interface StackPlace {
  readonly name: string;
  readonly expert: number;
  readonly experts: number;
  /** Experts that a token takes. */
  readonly chosen: number;
}

/** A place for activations, shared by all modules that name it. */
export interface TemporarySpec {
  readonly label: string;
  /** `tokens`: as many as a pass can have. `slots`: as many as the cache has, kept from pass to pass. */
  readonly rows: "tokens" | "slots" | number;
  readonly columns: number;
  readonly type: ElementType;
}

export interface BuildContext {
  readonly device: Device;
  readonly pipelines: PipelineCache;
  readonly weights: WeightSource;
  /** Writes whole rows of a temporary that the module declared, as they lie in memory: what the host makes once. */
  fill(label: string, firstRow: number, bytes: Uint8Array): void;
  /** Where a binding has to be something although the kernel does not read it. */
  readonly nothing: Tensor;
}

/** The weights of a plan, on the device. */
export interface WeightSource {
  matrix(spec: WeightSpec): Matrix;
  /** By the name that its experts' specs give. */
  experts(stack: string): ExpertStack;
  vector(spec: WeightSpec): Tensor;
}

export const matrixSpec = (
  names: readonly string[],
  rows: number,
  columns: number,
  {
    storedTransposed = false,
    quantizable = false,
    gathered = false,
    ...rest
  }: Partial<
    Pick<WeightSpec, "storedTransposed" | "quantizable" | "isQuantizedAtLoad" | "gathered" | "stack" | "rowsTogether">
  > = {},
): WeightSpec => ({ names, kind: "matrix", rows, columns, storedTransposed, quantizable, gathered, ...rest });

export const vectorSpec = (name: string, columns: number, { keepsF32 = false } = {}): WeightSpec => ({
  names: [name],
  kind: "vector",
  rows: 1,
  columns,
  storedTransposed: false,
  quantizable: false,
  gathered: false,
  keepsF32,
});

export const temporary = (
  label: string,
  columns: number,
  { rows = "tokens", type = "f32" }: { rows?: TemporarySpec["rows"]; type?: ElementType } = {},
): TemporarySpec => ({ label, rows, columns, type });
