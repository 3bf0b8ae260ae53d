import { copyFileSync, mkdirSync, mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { basename, join } from "node:path";
import { MESHNET } from "./meshnet.ts";

/** Whether this machine lets a test see another root: Linux with user and mount namespaces. */
export const canMakeRoots =
  process.platform === "linux" &&
  Bun.which("unshare") !== null &&
  Bun.spawnSync(["unshare", "-rm", "sh", "-c", "mount --bind /tmp /tmp && command -v chroot"]).exitCode === 0;

export interface BareRoot extends Disposable {
  readonly path: string;
  /** Goes in front of the binary: what runs sees nothing but this root, its /proc, /dev/null and /dev/urandom. */
  readonly wrapper: string[];
}

/** A root with the C library that the binary needs and nothing else. `libraries`: files by the names they get there. */
export function bareRoot(
  options: { libraries?: Record<string, string | undefined>; isReadOnly?: boolean } = {},
): BareRoot {
  const path = mkdtempSync(join(tmpdir(), "meshnet-root-"));
  for (const folder of ["proc", "dev", "tmp", "lib", "lib64"]) mkdirSync(join(path, folder));
  for (const file of ["meshnet", "dev/null", "dev/urandom"]) writeFileSync(join(path, file), "");
  for (const library of linkedLibraries()) {
    copyFileSync(library, join(path, library.includes("/ld-") ? "lib64" : "lib", basename(library)));
  }
  for (const [name, from] of Object.entries(options.libraries ?? {})) {
    const to = join(path, "lib", name);
    if (from === undefined) writeFileSync(to, "");
    else copyFileSync(from, to);
  }
  const script = options.isReadOnly ? [BIND_SELF, MOUNT, READ_ONLY, ENTER] : [MOUNT, ENTER];
  return {
    path,
    wrapper: ["unshare", "-rm", "sh", "-ec", script.join("\n"), "sh", path],
    [Symbol.dispose]: () => rmSync(path, { recursive: true, force: true }),
  };
}

/** `$1`: the root, `$2`: the binary; its words are behind it. */
const BIND_SELF = 'mount --bind "$1" "$1"';
const MOUNT = `
  cd "$1"
  mount --rbind /proc proc
  mount --bind /dev/null dev/null
  mount --bind /dev/urandom dev/urandom
  mount --bind "$2" meshnet`;
const READ_ONLY = 'mount -o remount,ro,bind "$1"';
const ENTER = 'root="$1"; shift 2; exec chroot "$root" /meshnet "$@"';

/** Those that the dynamic linker loads with the binary, itself included. */
function linkedLibraries(): string[] {
  const { stdout } = Bun.spawnSync(["ldd", MESHNET]);
  return [...stdout.toString().matchAll(/(\/\S+) \(0x/g)].map(([, path]) => path!);
}
