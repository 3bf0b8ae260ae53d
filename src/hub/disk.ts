import { statfs } from "node:fs/promises";
import { formatBytes } from "../base/bytes.ts";
import { messageOf, UserError } from "../base/errors.ts";
import { codeOf } from "./cache.ts";

/** Throws UserError `download` where `neededBytes` more cannot be written into `folder`, which must be there. */
export async function checkDiskSpace(folder: string, neededBytes: number, what: string): Promise<void> {
  const { bavail, bsize, blocks } = await statfs(folder).catch(() => UNKNOWN);
  if (blocks === 0 || bavail * bsize >= neededBytes) return; // some network disks do not tell
  throw new UserError(
    "download",
    `${what} needs ${formatBytes(neededBytes)} more, and the disk of ${folder} has ${formatBytes(bavail * bsize)} free`,
    `make room (meshnet cache prune), take fewer layers, or name another place with --cache-dir`,
  );
}

const UNKNOWN = { bavail: 0, bsize: 0, blocks: 0 };

/** What a failed write means to a user, or undefined where the disk is not to blame. */
export function diskProblem(error: unknown, what: string): UserError | undefined {
  switch (codeOf(error)) {
    case "ENOSPC":
    case "EDQUOT":
      return new UserError(
        "download",
        `the disk is full: ${what} cannot be written any further`,
        "make room (meshnet cache prune) or name another place with --cache-dir, and run it again: what has arrived is kept",
        { cause: error },
      );
    case "EACCES":
    case "EPERM":
    case "EROFS":
    case "ENOTDIR":
      return new UserError(
        "download",
        `${what} cannot be written into the cache: ${messageOf(error)}`,
        "name a place that may be written with --cache-dir",
        { cause: error },
      );
    default:
      return undefined;
  }
}
