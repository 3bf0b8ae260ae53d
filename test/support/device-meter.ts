import { createGpu } from "../../src/gpu/dawn.ts";

/** What this process has taken of all its devices, seen where buffers are made: below every count of our own. */
export interface DeviceMeter extends Disposable {
  readonly liveBytes: number;
  /** The most at a time since the last `reset`. */
  readonly peakBytes: number;
  reset(): void;
}

/** Watches `createBuffer` and `destroy` of every device until the end of its scope. */
export async function deviceMeter(): Promise<DeviceMeter> {
  await createGpu(); // makes the classes of WebGPU known
  const live = new Map<GPUBuffer, { device: GPUDevice; bytes: number }>();
  let liveBytes = 0;
  let peakBytes = 0;
  const gone = (buffer: GPUBuffer) => {
    liveBytes -= live.get(buffer)?.bytes ?? 0;
    live.delete(buffer);
  };
  const { createBuffer, destroy: destroyDevice } = GPUDevice.prototype;
  const { destroy } = GPUBuffer.prototype;
  GPUDevice.prototype.createBuffer = function (descriptor) {
    const buffer = createBuffer.call(this, descriptor);
    live.set(buffer, { device: this, bytes: descriptor.size });
    liveBytes += descriptor.size;
    peakBytes = Math.max(peakBytes, liveBytes);
    return buffer;
  };
  GPUBuffer.prototype.destroy = function () {
    gone(this);
    return destroy.call(this);
  };
  GPUDevice.prototype.destroy = function () {
    for (const [buffer, { device }] of live) if (device === this) gone(buffer);
    return destroyDevice.call(this);
  };
  return {
    get liveBytes() {
      return liveBytes;
    },
    get peakBytes() {
      return peakBytes;
    },
    reset: () => void (peakBytes = liveBytes),
    [Symbol.dispose]() {
      GPUDevice.prototype.createBuffer = createBuffer;
      GPUDevice.prototype.destroy = destroyDevice;
      GPUBuffer.prototype.destroy = destroy;
    },
  };
}
