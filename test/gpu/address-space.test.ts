import { expect, test } from "bun:test";
import { DEVICE_ADDRESS_BYTES, requireAddressSpace } from "../../src/gpu/address-space.ts";

const GIB = 2 ** 30;

test("a ulimit -v below what a driver lives in is refused by its name, with both numbers and the way out", () => {
  const space = { limitBytes: 3 * GIB, freeBytes: DEVICE_ADDRESS_BYTES - 1 };
  let refusal: unknown;
  try {
    requireAddressSpace(space);
  } catch (error) {
    refusal = error;
  }
  expect(refusal).toMatchObject({
    code: "does_not_fit",
    message: expect.stringMatching(/^ulimit -v gives this process 3\.0 GiB .* 1\.\d GiB are left, .* takes 1\.3 GiB$/),
    hint: expect.stringContaining("ulimit -v unlimited"),
  });
});

test("enough addresses, or as many as there are, are no reason to refuse", () => {
  requireAddressSpace({ limitBytes: 3 * GIB, freeBytes: DEVICE_ADDRESS_BYTES });
  requireAddressSpace(undefined);
});
