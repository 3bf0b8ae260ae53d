import type { Device } from "./device.ts";

export type Access = "read" | "read_write";
export type Workgroups = readonly [x: number, y: number, z: number];

/** The TypeScript twin of one WGSL file: what it binds, which constants it is compiled with, how far it reaches. */
export interface Kernel<B extends string, C extends string, P extends string, D> {
  readonly name: string;
  /** The libraries, then the kernel itself, as one WGSL module with the entry point `main`. */
  readonly source: string;
  /** Storage bindings in order, from `@binding(1)` on. */
  readonly bindings: Readonly<Record<B, Access>>;
  /** Every `override` that the caller gives a value. */
  readonly constants: readonly C[];
  /** The fields of `struct Params` at `@binding(0)`, in order. */
  readonly params: Readonly<Record<P, "u32" | "f32">>;
  readonly workgroups: (dims: D) => Workgroups;
}

export function defineKernel<const B extends string, const C extends string, const P extends string, D>(spec: {
  name: string;
  source: readonly string[];
  bindings: Readonly<Record<B, Access>>;
  constants: readonly C[];
  params: Readonly<Record<P, "u32" | "f32">>;
  workgroups: (dims: D) => Workgroups;
}): Kernel<B, C, P, D> {
  return { ...spec, source: spec.source.join("\n") };
}

/** A kernel compiled for one device with one set of constants. */
export interface Pipeline<B extends string, P extends string, D> {
  readonly id: number;
  readonly label: string;
  readonly bindings: readonly B[];
  readonly params: readonly { readonly name: P; readonly type: "u32" | "f32" }[];
  readonly workgroups: (dims: D) => Workgroups;
  readonly gpuPipeline: GPUComputePipeline;
  readonly gpuLayout: GPUBindGroupLayout;
}

/** The cache holds pipelines of every kernel; `compile` gives each its own type back. */
type AnyPipeline = Pipeline<string, string, never>;

/** Compiles each kernel once per device and set of constants. */
export class PipelineCache {
  readonly #device: Device;
  readonly #pipelines = new Map<string, Promise<AnyPipeline>>();
  #nextId = 0;

  private constructor(device: Device) {
    this.#device = device;
  }

  /** The one cache of a device: its pipelines outlive any stage. */
  static of(device: Device): PipelineCache {
    let cache = CACHES.get(device);
    if (!cache) CACHES.set(device, (cache = new PipelineCache(device)));
    return cache;
  }

  /** @throws Error with the compiler's message, line and column: a kernel that does not compile is a bug. */
  compile<B extends string, C extends string, P extends string, D>(
    kernel: Kernel<B, C, P, D>,
    values: Readonly<Record<C, number>>,
  ): Promise<Pipeline<B, P, D>> {
    // Only those that this variant of a kernel declares: any other one would be refused.
    const constants = Object.fromEntries(kernel.constants.map((name) => [name, values[name]]));
    const label = labelOf(kernel.name, constants);
    const key = `${label}\n${kernel.source}`;
    let pipeline = this.#pipelines.get(key);
    if (!pipeline) {
      pipeline = compilePipeline(this.#device, kernel, constants, label, this.#nextId++);
      this.#pipelines.set(key, pipeline);
      pipeline.catch(() => this.#pipelines.delete(key)); // not for lack of memory, and the next one finds some
    }
    return pipeline as unknown as Promise<Pipeline<B, P, D>>;
  }
}

const CACHES = new WeakMap<Device, PipelineCache>();

const labelOf = (name: string, constants: Readonly<Record<string, number>>): string =>
  `${name}(${Object.entries(constants)
    .map(([key, value]) => `${key}=${value}`)
    .join(" ")})`;

async function compilePipeline(
  device: Device,
  kernel: Kernel<string, string, string, never>,
  constants: Readonly<Record<string, number>>,
  label: string,
  id: number,
): Promise<AnyPipeline> {
  const { gpu } = device;
  const module = gpu.createShaderModule({ label, code: kernel.source });
  const errors = (await module.getCompilationInfo()).messages.filter((message) => message.type === "error");
  if (errors.length > 0) throw new Error(compilerReport(label, kernel.source, errors));

  const params = Object.entries(kernel.params).map(([name, type]) => ({ name, type }));
  const entries: GPUBindGroupLayoutEntry[] = Object.values(kernel.bindings).map((access, index) => ({
    binding: index + 1,
    visibility: GPUShaderStage.COMPUTE,
    buffer: { type: access === "read" ? "read-only-storage" : "storage" },
  }));
  if (params.length > 0)
    entries.unshift({ binding: 0, visibility: GPUShaderStage.COMPUTE, buffer: { type: "uniform" } });

  const gpuLayout = gpu.createBindGroupLayout({ label, entries });
  const gpuPipeline = await gpu.createComputePipelineAsync({
    label,
    layout: gpu.createPipelineLayout({ label, bindGroupLayouts: [gpuLayout] }),
    compute: { module, entryPoint: "main", constants },
  });
  return {
    id,
    label,
    bindings: Object.keys(kernel.bindings),
    params,
    workgroups: kernel.workgroups,
    gpuPipeline,
    gpuLayout,
  };
}

function compilerReport(label: string, source: string, errors: readonly GPUCompilationMessage[]): string {
  const lines = source.split("\n");
  return errors
    .map(
      ({ message, lineNum, linePos }) => `${label}:${lineNum}:${linePos} ${message}\n    ${lines[lineNum - 1] ?? ""}`,
    )
    .join("\n");
}
