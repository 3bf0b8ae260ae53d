import { roundUp } from "../base/bytes.ts";
import type { Device } from "./device.ts";
import type { Pipeline, Workgroups } from "./kernel.ts";
import type { Tensor } from "./tensor.ts";

/** Uniform slots in the arena; a pass that needs more is submitted in pieces. */
const SLOTS = 2048;
/** `minUniformBufferOffsetAlignment` is at most this on every device. */
const SLOT_BYTES = 256;
/** The uniform arena: what `Commands` takes of the device from its beginning. */
export const UNIFORM_BYTES = SLOTS * SLOT_BYTES;
/** What a readback buffer takes at least. */
const LEAST_READBACK_BYTES = 1 << 16;

/** What the buffer takes of the device through which so many bytes are read. */
export const readbackBytes = (bytes: number): number => Math.max(roundUp(bytes, 4), LEAST_READBACK_BYTES);

/**
 * Records dispatches and hands them to the device as one submit. Dispatches run in the order in which they were
 * recorded, each seeing what the earlier ones wrote.
 */
export class Commands {
  readonly #device: Device;
  readonly #uniforms: GPUBuffer;
  readonly #uniformBytes = new ArrayBuffer(SLOTS * SLOT_BYTES);
  readonly #uniformView = new DataView(this.#uniformBytes);
  readonly #bindGroups = new Map<string, GPUBindGroup>();
  readonly #tensorIds = new WeakMap<Tensor, number>();
  #nextTensorId = 0;
  #slots = 0;
  #encoder: GPUCommandEncoder | undefined;
  #pass: GPUComputePassEncoder | undefined;
  #staging: GPUBuffer | undefined;

  constructor(device: Device) {
    this.#device = device;
    this.#uniforms = device.createBuffer({
      label: "uniforms",
      size: UNIFORM_BYTES,
      usage: GPUBufferUsage.UNIFORM | GPUBufferUsage.COPY_DST,
    });
  }

  /** Device bytes that this object holds besides tensors: the uniform arena and the readback buffer. */
  get allocatedBytes(): number {
    return this.#uniforms.size + (this.#staging?.size ?? 0);
  }

  /** Makes room for reads of so many bytes now, so that none has to ask the device for memory later. */
  reserveReadback(bytes: number): void {
    this.#stagingOf(bytes);
  }

  /** Records one dispatch of `pipeline` over `dims`. */
  dispatch<B extends string, P extends string, D>(
    pipeline: Pipeline<B, P, D>,
    bindings: Readonly<Record<B, Tensor>>,
    params: Readonly<Record<P, number>>,
    dims: D,
  ): void {
    const [x, y, z] = checkWorkgroups(pipeline.workgroups(dims), pipeline.label, this.#device);
    if (x * y * z === 0) return;
    if (this.#slots === SLOTS) this.flush();
    this.#encoder ??= this.#device.gpu.createCommandEncoder({ label: "pass" });
    this.#pass ??= this.#encoder.beginComputePass({ label: "pass" });
    this.#pass.setPipeline(pipeline.gpuPipeline);
    this.#pass.setBindGroup(0, this.#bindGroup(pipeline, bindings, this.#writeParams(pipeline, params)));
    this.#pass.dispatchWorkgroups(x, y, z);
  }

  /** Records a copy of bytes between two tensors; offsets and length are multiples of 4. */
  copy(from: Tensor, fromByte: number, to: Tensor, toByte: number, byteLength: number): void {
    this.#encoder ??= this.#device.gpu.createCommandEncoder({ label: "pass" });
    this.#endPass();
    this.#encoder.copyBufferToBuffer(from.buffer, fromByte, to.buffer, toByte, byteLength);
  }

  /** Submits what was recorded, without waiting. */
  flush(): void {
    if (!this.#encoder) return;
    this.#endPass();
    const commandBuffer = this.#encoder.finish();
    this.#encoder = undefined;
    const { queue } = this.#device.gpu;
    queue.writeBuffer(this.#uniforms, 0, this.#uniformBytes, 0, this.#slots * SLOT_BYTES);
    this.#slots = 0;
    queue.submit([commandBuffer]);
  }

  /** Submits what was recorded and resolves when the device is done with it. */
  async finish(): Promise<void> {
    this.flush();
    await this.#device.gpu.queue.onSubmittedWorkDone();
  }

  /** Submits what was recorded and gives a copy of the first `byteLength` bytes of `tensor`. */
  async read(tensor: Tensor, byteLength = tensor.byteLength): Promise<Uint8Array<ArrayBuffer>> {
    const size = roundUp(byteLength, 4);
    const staging = this.#stagingOf(size);
    this.#encoder ??= this.#device.gpu.createCommandEncoder({ label: "pass" });
    this.#endPass();
    this.#encoder.copyBufferToBuffer(tensor.buffer, 0, staging, 0, size);
    this.flush();
    try {
      await staging.mapAsync(GPUMapMode.READ, 0, size);
    } catch (error) {
      this.#dropStaging(); // there may have been no memory for it: the next read asks anew
      throw error;
    }
    const copy = new Uint8Array(byteLength);
    copy.set(new Uint8Array(staging.getMappedRange(0, size), 0, byteLength));
    staging.unmap();
    return copy;
  }

  destroy(): void {
    this.#uniforms.destroy();
    this.#staging?.destroy();
  }

  #endPass(): void {
    this.#pass?.end();
    this.#pass = undefined;
  }

  #writeParams(pipeline: Pipeline<string, string, never>, params: Readonly<Record<string, number>>): number {
    if (pipeline.params.length === 0) return -1;
    const slot = this.#slots++;
    pipeline.params.forEach(({ name, type }, index) => {
      const offset = slot * SLOT_BYTES + index * 4;
      const value = params[name]!;
      if (type === "u32") this.#uniformView.setUint32(offset, value, true);
      else this.#uniformView.setFloat32(offset, value, true);
    });
    return slot;
  }

  /** Bind groups are dear (tens of microseconds) and the same ones come back with every pass. */
  #bindGroup(
    pipeline: Pipeline<string, string, never>,
    bindings: Readonly<Record<string, Tensor>>,
    slot: number,
  ): GPUBindGroup {
    const tensors = pipeline.bindings.map((name) => bindings[name]!);
    const key = `${pipeline.id}/${slot}/${tensors.map((tensor) => this.#idOf(tensor)).join()}`;
    let group = this.#bindGroups.get(key);
    if (!group) {
      const entries: GPUBindGroupEntry[] = tensors.map(({ buffer }, index) => ({
        binding: index + 1,
        resource: { buffer },
      }));
      if (slot >= 0) {
        const size = Math.ceil((pipeline.params.length * 4) / 16) * 16;
        entries.unshift({ binding: 0, resource: { buffer: this.#uniforms, offset: slot * SLOT_BYTES, size } });
      }
      group = this.#device.gpu.createBindGroup({ label: pipeline.label, layout: pipeline.gpuLayout, entries });
      if (this.#bindGroups.size >= 4 * SLOTS) this.#bindGroups.clear();
      this.#bindGroups.set(key, group);
    }
    return group;
  }

  #idOf(tensor: Tensor): number {
    let id = this.#tensorIds.get(tensor);
    if (id === undefined) this.#tensorIds.set(tensor, (id = this.#nextTensorId++));
    return id;
  }

  #dropStaging(): void {
    this.#staging?.destroy();
    this.#staging = undefined;
  }

  #stagingOf(size: number): GPUBuffer {
    if (this.#staging && this.#staging.size >= size) return this.#staging;
    this.#dropStaging();
    this.#staging = this.#device.createBuffer({
      label: "readback",
      size: readbackBytes(size),
      usage: GPUBufferUsage.MAP_READ | GPUBufferUsage.COPY_DST,
    });
    return this.#staging;
  }
}

function checkWorkgroups(workgroups: Workgroups, label: string, device: Device): Workgroups {
  const limit = device.limits.maxComputeWorkgroupsPerDimension;
  if (workgroups.some((count) => count > limit)) {
    throw new Error(`${label}: ${workgroups.join(" × ")} workgroups, and the device takes ${limit} per dimension`);
  }
  return workgroups;
}
