import { describe } from "bun:test";
import { silentLogger } from "../../src/base/log.ts";
import { type Device, listAdapters, openDevice } from "../../src/gpu/device.ts";

export interface TestDevice {
  name: string;
  /** Undefined where this machine lacks it. */
  adapter: string | undefined;
  /** The same device for all tests of the process. A GPU error that no error scope awaits fails the run. */
  open(): Promise<Device>;
}

const adapters = await listAdapters(silentLogger);

/** The two software devices that every kernel must agree on; `sh .ci/setup` brings both to a Linux x64 machine. */
export const softwareDevices: TestDevice[] = [testDevice("lavapipe", "llvmpipe"), testDevice("SwiftShader")];

/**
 * A group of tests for each software device, `on lavapipe` and `on SwiftShader`; the group of a device that this
 * machine lacks is skipped under a name that says so.
 */
export function describeOnDevices(title: string, tests: (device: TestDevice) => void): void {
  for (const device of softwareDevices) {
    const missing = device.adapter === undefined;
    const name = `${title} on ${device.name}${missing ? " (not on this machine: run `sh .ci/setup`)" : ""}`;
    describe.skipIf(missing)(name, () => tests(device));
  }
}

function testDevice(name: string, adapterName = name): TestDevice {
  let opened: Promise<Device> | undefined;
  return {
    name,
    adapter: adapters.find((adapter) => adapter.name.includes(adapterName))?.name,
    open: () =>
      (opened ??= openDevice({
        select: adapterName,
        log: silentLogger,
        wanted: { bufferBytes: 2 ** 30, bindingBytes: 2 ** 30 },
        onUncapturedError: fail,
      })),
  };
}

/** An unhandled rejection: `bun test` fails the test that runs, or the whole run between two tests. */
function fail(message: string): void {
  void Promise.reject(new Error(`GPU error: ${message}`));
}
