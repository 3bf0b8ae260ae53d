import { describe, expect, test } from "bun:test";
import { type LogFields, silentLogger } from "../../src/base/log.ts";
import { openDevice } from "../../src/gpu/device.ts";
import { softwareDevices } from "../support/device.ts";
import { TINY } from "../support/oracle.ts";
import { idsInput, openFixture } from "../support/stages.ts";

/** Dawn's ways, the same on every driver: the first one here will do. */
const device = softwareDevices.find(({ adapter }) => adapter !== undefined);

describe.skipIf(!device)(`a device (${device?.name ?? "none on this machine: run .ci/setup"})`, () => {
  const open = (log = silentLogger) =>
    openDevice({ select: device!.adapter!, log, wanted: { bufferBytes: 0, bindingBytes: 0 } });

  test("that reports an error in a pass gives no result for it, one log line, and goes on", async () => {
    const errors: LogFields[] = [];
    const opened = await open({ ...silentLogger, error: (_, fields) => errors.push(fields!) });
    const stage = await openFixture(opened, TINY);
    const expected = await stage.forward(idsInput([1, 2, 3]), "token");

    const broken = stage.forward(idsInput([1, 2, 3]), "token");
    while (stage.passMs === 0) await Bun.sleep(0); // until the pass has begun
    opened.gpu.createBuffer({ label: "broken", size: 4, usage: GPUBufferUsage.MAP_READ | GPUBufferUsage.STORAGE });
    expect(broken).rejects.toThrow("reported an error in this pass");
    await broken.catch(() => {});
    expect(errors).toHaveLength(1);
    expect(await stage.forward(idsInput([1, 2, 3]), "token")).toEqual(expected);
    opened.destroy();
  }, 60_000);

  test("that is gone makes a pass fail instead of hang", async () => {
    const opened = await open();
    const stage = await openFixture(opened, TINY);
    opened.destroy();
    expect(stage.forward(idsInput([1, 2, 3]), "token")).rejects.toThrow();
  }, 60_000);
});
