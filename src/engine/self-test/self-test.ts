import type { Device } from "../../gpu/device.ts";
import type { Kernel } from "../../gpu/kernel.ts";
import { type Sharing, SUBGROUP_LANES } from "../../kernels/index.ts";
import type { Bench } from "./bench.ts";

export type AnyKernel = Kernel<string, string, string, never>;

/** What is wrong with a kernel's results, or undefined. */
export type Verdict = string | undefined;

/** One kernel over one small, awkward case, whose result the plain version in `kernels/reference` knows. */
export interface SelfTest {
  /** The kernel's, and of a kernel with variants which. */
  readonly name: string;
  readonly kernel: AnyKernel;
  /** Why this device cannot run it, or undefined. */
  readonly missing: (device: Device) => Verdict | Promise<Verdict>;
  /** `kernel`: instead of its own; a test of this test gives a broken one. */
  run(bench: Bench, kernel?: AnyKernel): Promise<Verdict>;
}

export function selfTest<K extends AnyKernel>(
  kernel: K,
  run: (bench: Bench, kernel: K) => Promise<Verdict>,
  { variant, missing = () => undefined }: { variant?: string; missing?: SelfTest["missing"] } = {},
): SelfTest {
  return {
    name: variant === undefined ? kernel.name : `${kernel.name} (${variant})`,
    kernel,
    missing,
    run: (bench, other) => run(bench, (other as K | undefined) ?? kernel),
  };
}

/** Of a kernel whose lanes share loads: which variant, and what it needs. */
export const bySharing = (variant: Sharing) => ({
  variant,
  missing: ({ info }: Device) =>
    info.subgroupMinSize < SUBGROUP_LANES[variant]
      ? `this device has no subgroups of ${SUBGROUP_LANES[variant]} lanes`
      : undefined,
});
