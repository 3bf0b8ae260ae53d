/**
 * Why a file name that came from outside (a shard index, a Hub listing) may not be joined to a folder, or undefined
 * where it may. Such a name is hostile until shown otherwise: it decides what this process reads and writes.
 */
export function unsafePathReason(name: string): string | undefined {
  // Decoded until nothing changes, as a server or a proxy in between may have decoded any number of times.
  for (let plain = name; ;) {
    const reason = reasonAgainst(plain);
    if (reason) return reason;
    const decoded = percentDecode(plain);
    if (decoded === undefined) return "a broken percent escape";
    if (decoded === plain) return undefined;
    plain = decoded;
  }
}

function reasonAgainst(name: string): string | undefined {
  if (name === "") return "an empty name";
  // oxlint-disable-next-line no-control-regex -- control characters are what is looked for
  if (/[\u0000-\u001f\u007f]/.test(name)) return "a control character";
  if (name.includes("\\")) return "a backslash";
  if (name.startsWith("/")) return "an absolute path";
  const segments = name.split("/");
  if (segments[0]?.includes(":")) return "a colon, as in a drive or a URL";
  if (segments.some((segment) => segment === "" || segment === "." || segment === "..")) {
    return 'a path segment that is empty, "." or ".."';
  }
  return undefined;
}

function percentDecode(name: string): string | undefined {
  try {
    return decodeURIComponent(name);
  } catch {
    return undefined;
  }
}
