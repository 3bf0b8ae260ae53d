import type { Logger } from "../../base/log.ts";
import type { Environment } from "../../hub/settings.ts";

/** What every check may look at. */
export interface DoctorContext {
  readonly env: Environment;
  readonly log: Logger;
  /** The words that start this program again, for checks in a process of their own. */
  readonly self: readonly string[];
  /** A child that says nothing for so long hangs; one that compiles kernels has three times that. */
  readonly silenceMs: number;
  /** Leave away what takes seconds: the measurements, and most kernels of the self-test. */
  readonly quick: boolean;
  /** `--device`. */
  readonly device: string;
}
