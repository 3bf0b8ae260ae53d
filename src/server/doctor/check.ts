import { messageOf, UserError } from "../../base/errors.ts";

/** `warn`: it works, but not as well as it could. `skip`: it was not looked at, or there is nothing to look at. */
export type CheckStatus = "ok" | "warn" | "fail" | "skip";

/** One thing that was looked at. `docs/doctor.md` lists every id with its facts. */
export interface Check {
  readonly id: CheckId;
  /** Which one, where there may be several: a driver's file, a device's name, a URL. */
  readonly subject: string | null;
  readonly status: CheckStatus;
  /** What was found, in one line. */
  readonly found: string;
  /** Further lines for people. */
  readonly details: readonly string[];
  /** What to do about it; null where nothing need be done. */
  readonly remedy: string | null;
  /** The same as values. */
  readonly facts: Readonly<Record<string, unknown>>;
}

/** In the order in which they are made. */
export const CHECK_IDS = [
  "binary",
  "system",
  "temporary-folder",
  "c-library",
  "gpu-runtime",
  "vulkan-loader",
  "driver",
  "adapter",
  "self-test",
  "speed",
  "device",
  "cache",
  "hub",
  "clock",
  "port",
  "model",
  "peer",
] as const;
export type CheckId = (typeof CHECK_IDS)[number];

export type Finding = { readonly status: CheckStatus; readonly found: string } & Partial<
  Pick<Check, "subject" | "details" | "remedy" | "facts">
>;

export const checkOf = (
  id: CheckId,
  { subject = null, status, found, details = [], remedy = null, facts = {} }: Finding,
): Check => ({ id, subject, status, found, details, remedy, facts });

/** A check that itself goes wrong is one that failed; those after it go on. */
export async function guarded(
  id: CheckId,
  subject: string | null,
  look: () => Finding | Promise<Finding>,
): Promise<Check> {
  try {
    return checkOf(id, { subject, ...(await look()) });
  } catch (error) {
    const remedy = error instanceof UserError ? error.hint : "report this: the check itself broke";
    const found = error instanceof UserError ? error.message : `this check broke: ${messageOf(error)}`;
    const facts = error instanceof UserError ? { code: error.code } : {};
    return checkOf(id, { subject, status: "fail", found, remedy, facts });
  }
}
