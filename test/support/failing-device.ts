import { silentLogger } from "../../src/base/log.ts";
import { Device, openDevice } from "../../src/gpu/device.ts";
import type { TestDevice } from "./device.ts";

/**
 * How an allocation fails. `buffer`: as WebGPU has it, an invalid buffer and an out-of-memory error. `throws`: createBuffer
 * itself, as where the host has no memory. `write`: writeBuffer, whose copy on the way has no room.
 */
export type Failure = "buffer" | "throws" | "write";

/**
 * A real device on which one allocation fails, the n-th from now on, and that knows which of its buffers were not given
 * back. An out-of-memory error goes where WebGPU would have it: to the innermost scope that waits for one, else to the
 * listeners.
 */
export class FailingDevice implements Disposable {
  readonly device: Device;
  /** Allocations of the kind that is to fail, since `failAt`. */
  allocations = 0;
  readonly #gpu: GPUDevice;
  readonly #alive = new Map<GPUBuffer, string>();
  readonly #scopes: { filter: GPUErrorFilter; error?: GPUError }[] = [];
  readonly #listeners: ((event: Event) => void)[] = [];
  #isReclaimed = true;
  #failing: { kind: Failure; nth: number } | undefined;

  /** `onUncapturedError`: for errors that no scope waits for. */
  static async open({ adapter }: TestDevice, onUncapturedError: (message: string) => void): Promise<FailingDevice> {
    const wanted = { bufferBytes: 2 ** 28, bindingBytes: 2 ** 28 };
    // The device below says nothing: what it meets, the one above meets too.
    const real = await openDevice({ select: adapter!, log: silentLogger, wanted, onUncapturedError: () => {} });
    return new FailingDevice(real, onUncapturedError);
  }

  private constructor(
    readonly real: Device,
    onUncapturedError: (message: string) => void,
  ) {
    this.#gpu = real.gpu;
    this.device = new Device(this.#proxy(), real.info, {
      select: real.info.name,
      log: silentLogger,
      wanted: { bufferBytes: 0, bindingBytes: 0 },
      onUncapturedError,
    });
  }

  [Symbol.dispose](): void {
    this.real.destroy();
  }

  /** `nth` from 0; one that does not come leaves everything well. */
  failAt(kind: Failure, nth: number): void {
    this.#failing = { kind, nth };
    this.allocations = 0;
  }

  /** Labels of the buffers that have not been destroyed. */
  get alive(): string[] {
    return [...this.#alive.values()];
  }

  /** Whether the memory of destroyed buffers has come back: Dawn returns it at a submission. */
  get isReclaimed(): boolean {
    return this.#isReclaimed;
  }

  #proxy(): GPUDevice {
    const queue = withOwn(this.#gpu.queue, {
      writeBuffer: (...args: Parameters<GPUQueue["writeBuffer"]>) => {
        if (this.#fails("write")) this.#report("no room for what is written");
        else this.#gpu.queue.writeBuffer(...args);
      },
      submit: (commands: Iterable<GPUCommandBuffer>) => {
        this.#gpu.queue.submit(commands);
        this.#isReclaimed = true;
      },
    });
    return withOwn(this.#gpu, {
      queue,
      createBuffer: (descriptor: GPUBufferDescriptor) => this.#createBuffer(descriptor),
      pushErrorScope: (filter: GPUErrorFilter) => {
        this.#scopes.push({ filter });
        this.#gpu.pushErrorScope(filter);
      },
      popErrorScope: async () => {
        const injected = this.#scopes.pop()?.error;
        const own = await this.#gpu.popErrorScope();
        return injected ?? own;
      },
      addEventListener: (type: string, listener: (event: Event) => void) => {
        this.#listeners.push(listener);
        this.#gpu.addEventListener(type, listener);
      },
    });
  }

  #createBuffer(descriptor: GPUBufferDescriptor): GPUBuffer {
    if (this.#fails("throws")) throw new RangeError("createBuffer failed");
    const isRefused = this.#fails("buffer");
    const buffer = isRefused ? this.#invalidBuffer(descriptor) : this.#gpu.createBuffer(descriptor);
    if (isRefused) this.#report(`no memory for ${descriptor.label}`);
    else this.#alive.set(buffer, descriptor.label ?? "");
    const destroy = buffer.destroy.bind(buffer);
    buffer.destroy = () => {
      this.#alive.delete(buffer);
      this.#isReclaimed = false;
      destroy();
    };
    return buffer;
  }

  /** It says what was asked for, and is of no use. */
  #invalidBuffer({ size, label }: GPUBufferDescriptor): GPUBuffer {
    this.#gpu.pushErrorScope("validation");
    const buffer = this.#gpu.createBuffer({ label, size, usage: 0 });
    void this.#gpu.popErrorScope();
    return buffer;
  }

  #fails(kind: Failure): boolean {
    return this.#failing?.kind === kind && this.allocations++ === this.#failing.nth;
  }

  #report(message: string): void {
    const error = new GPUOutOfMemoryError(message);
    const scope = this.#scopes.findLast(({ filter }) => filter === "out-of-memory");
    if (scope) scope.error ??= error;
    else for (const listener of this.#listeners) listener(Object.assign(new Event("uncapturederror"), { error }));
  }
}

/** `target` with some members of its own; its methods are called on itself, as native ones must be. */
function withOwn<T extends object>(target: T, own: object): T {
  return new Proxy(target, {
    get(_, key) {
      if (Object.hasOwn(own, key)) return own[key as keyof typeof own];
      const value: unknown = Reflect.get(target, key, target);
      return typeof value === "function" ? value.bind(target) : value;
    },
  });
}
