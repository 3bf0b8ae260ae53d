import { afterEach, describe, expect, test } from "bun:test";
import { join } from "node:path";
import { type LogFields, type LogLevel, type Logger, silentLogger } from "../../src/base/log.ts";
import { UserError } from "../../src/base/errors.ts";
import { type Device, type DeviceOptions, listAdapters, openDevice } from "../../src/gpu/device.ts";
import { describeOnDevices, softwareDevices } from "../support/device.ts";

const MIB = 2 ** 20;
const NOTHING_WANTED = { bufferBytes: 0, bindingBytes: 0 };

let opened: Device[] = [];
afterEach(() => {
  for (const device of opened) device.destroy();
  opened = [];
});

describeOnDevices("a device", ({ adapter }) => {
  const open = async (options: Partial<DeviceOptions> = {}) => {
    const device = await openDevice({ select: adapter!, log: silentLogger, wanted: NOTHING_WANTED, ...options });
    opened.push(device);
    return device;
  };

  test("writes into a buffer what is read back from it", async () => {
    const { gpu } = await open();
    const buffer = gpu.createBuffer({ size: 8, usage: GPUBufferUsage.MAP_READ | GPUBufferUsage.COPY_DST });
    gpu.queue.writeBuffer(buffer, 0, new Float32Array([1.5, -2]));
    await buffer.mapAsync(GPUMapMode.READ);
    expect([...new Float32Array(buffer.getMappedRange())]).toEqual([1.5, -2]);
    buffer.destroy();
  });

  test("is announced as software, and with what that costs", async () => {
    const { log, lines } = recordingLogger();
    const device = await open({ log });
    expect(device.info).toMatchObject({ name: adapter, isSoftware: true });
    const warnings = lines.filter(({ level }) => level === "warn");
    expect(warnings).toMatchObject([{ event: "software_device", fields: { device: adapter } }]);
    expect(warnings[0]!.fields.cost).toContain("slower");
  });

  test("has limits beyond WebGPU's defaults when the load plan needs them", async () => {
    const wanted = { bufferBytes: 300 * MIB + 1, bindingBytes: 130 * MIB };
    const { gpu, maxBufferBytes, maxBindingBytes } = await open({ wanted });
    expect(maxBufferBytes).toBeGreaterThanOrEqual(wanted.bufferBytes);
    expect(maxBindingBytes % 256).toBe(0);
    gpu.pushErrorScope("validation");
    gpu.createBuffer({ size: wanted.bufferBytes + 3, usage: GPUBufferUsage.STORAGE }).destroy();
    expect(await gpu.popErrorScope()).toBeNull();
  });

  test("gives what its adapter has when more is wanted, and that much is really there", async () => {
    const wanted = { bufferBytes: 2 ** 43, bindingBytes: 2 ** 43 };
    const { gpu, maxBufferBytes, maxBindingBytes } = await open({ wanted });
    expect(maxBufferBytes).toBeLessThan(wanted.bufferBytes);
    expect(maxBindingBytes).toBeLessThanOrEqual(maxBufferBytes);
    gpu.pushErrorScope("validation");
    gpu.pushErrorScope("out-of-memory");
    gpu.createBuffer({ size: maxBufferBytes, usage: GPUBufferUsage.STORAGE }).destroy();
    expect(await gpu.popErrorScope()).toBeNull();
    expect(await gpu.popErrorScope()).toBeNull();
  });

  test("gives the memory of destroyed buffers back when it reclaims", async () => {
    const device = await open();
    const cycle = async () => {
      const buffer = device.gpu.createBuffer({ size: 64 * MIB, usage: GPUBufferUsage.COPY_DST });
      for (let offset = 0; offset < 64 * MIB; offset += chunk.length)
        device.gpu.queue.writeBuffer(buffer, offset, chunk);
      await device.reclaim();
      buffer.destroy();
      await device.reclaim();
    };
    const chunk = new Uint8Array(16 * MIB).fill(1);
    await cycle(); // what Dawn allocates once and keeps
    const before = process.memoryUsage.rss();
    for (let count = 0; count < 10; count++) await cycle();
    expect(process.memoryUsage.rss() - before).toBeLessThan(128 * MIB); // 640 MiB if nothing came back
  });

  test("turns a GPU error that nobody awaits into one line of the log", async () => {
    const { log, lines } = recordingLogger();
    const device = await open({ log });
    device.gpu.createBuffer({ label: "too large", size: 2 ** 44, usage: GPUBufferUsage.STORAGE });
    await device.reclaim();
    const errors = lines.filter(({ level }) => level === "error");
    expect(errors).toMatchObject([{ event: "gpu_error", fields: { device: adapter, kind: "GPUValidationError" } }]);
    expect(errors[0]!.fields.message).toContain("too large");
  });

  test("hands a GPU error to the caller who asked for it", async () => {
    const messages: string[] = [];
    const device = await open({ onUncapturedError: (message) => messages.push(message) });
    device.gpu.createBuffer({ size: 2 ** 44, usage: GPUBufferUsage.STORAGE });
    await device.reclaim();
    expect(messages).toHaveLength(1);
  });

  test("does not call its own destruction a loss", async () => {
    const losses: string[] = [];
    const device = await open({ onLost: (message) => losses.push(message) });
    device.destroy();
    await device.gpu.lost;
    expect(losses).toEqual([]);
  });

  test("prints nothing on stdout or stderr, neither drivers' warnings nor its own errors", async () => {
    const program = `
      import { createLogger } from ${JSON.stringify(join(import.meta.dir, "../../src/base/log.ts"))};
      import { openDevice } from ${JSON.stringify(join(import.meta.dir, "../../src/gpu/device.ts"))};
      const lines = [];
      const log = createLogger({ level: "debug", format: "text", write: (line) => lines.push(line) });
      const device = await openDevice({ select: ${JSON.stringify(adapter)}, log, wanted: { bufferBytes: 0, bindingBytes: 0 } });
      device.gpu.createBuffer({ size: 2 ** 44, usage: GPUBufferUsage.STORAGE });
      await device.reclaim();
      await Bun.write(Bun.file(3), lines.join("\\n"));
    `;
    const child = Bun.spawn([process.execPath, "-e", program], { stdio: ["ignore", "pipe", "pipe", "pipe"] });
    const log = await new Response(Bun.file(child.stdio[3] as number).stream()).text();
    expect(await child.stdout.text()).toBe("");
    expect(await child.stderr.text()).toBe("");
    expect(await child.exited).toBe(0);
    expect(log).toContain("debug native_warning");
    expect(log).toContain("error gpu_error");
  });
});

describe("choosing a device", () => {
  const open = (select: string) => openDevice({ select, log: silentLogger, wanted: NOTHING_WANTED });
  const [lavapipe, swiftshader] = softwareDevices;

  test("refuses an unknown name and lists the devices there are", async () => {
    const refusal = await open("Voodoo 2").catch((error: unknown) => error);
    expect(refusal).toBeInstanceOf(UserError);
    const { code, message, hint } = refusal as UserError;
    expect(code).toBe("no_device");
    expect(message).toStartWith('no device is named "Voodoo 2"');
    for (const { name } of await listAdapters(silentLogger)) expect(message).toContain(`"${name}"`);
    expect(hint).toContain("--device");
  });

  test.skipIf(!lavapipe!.adapter)("finds a device by a part of its name in any case (needs lavapipe)", async () => {
    opened.push(await open("LLVMpipe"));
    expect(opened[0]!.info).toMatchObject({ name: lavapipe!.adapter, bundledDriver: false });
  });

  test.skipIf(!lavapipe!.adapter)(
    "prefers an installed software driver to the bundled one (needs lavapipe)",
    async () => {
      opened.push(await open("cpu"));
      expect(opened[0]!.info.bundledDriver).toBe(false);
    },
  );

  test.skipIf(!swiftshader!.adapter)(
    "opens the bundled driver beside an installed one (needs SwiftShader)",
    async () => {
      opened = await Promise.all(["swiftshader", "cpu", "swiftshader"].map(open));
      const [bundled, cpu] = [swiftshader!.adapter!, lavapipe!.adapter ?? swiftshader!.adapter!];
      expect(opened.map(({ info }) => info.name)).toEqual([bundled, cpu, bundled]);
    },
  );
});

interface LogLine {
  level: LogLevel;
  event: string;
  fields: LogFields;
}

function recordingLogger(): { log: Logger; lines: LogLine[] } {
  const lines: LogLine[] = [];
  const at =
    (level: LogLevel) =>
    (event: string, fields: LogFields = {}) =>
      void lines.push({ level, event, fields });
  return { log: { debug: at("debug"), info: at("info"), warn: at("warn"), error: at("error") }, lines };
}
