import type { AdapterSummary } from "../../gpu/device.ts";
import type { VulkanDevice } from "../../gpu/vulkan-memory.ts";

/** An adapter that was found while its driver was the only one. */
export interface Named {
  readonly summary: AdapterSummary;
  /** As its driver described it; undefined where nothing did. */
  readonly device: VulkanDevice | undefined;
}

const keyOf = ({ name, bundledDriver }: AdapterSummary): string => `${bundledDriver} ${name}`;

/** Whether a name is that of several adapters which are each the first of that name by themselves. */
export function haveOneName(adapters: readonly Named[]): boolean {
  const firsts = adapters.filter(({ summary }) => summary.nameIndex === 0).map(({ summary }) => keyOf(summary));
  return new Set(firsts).size < firsts.length;
}

/**
 * The adapters with the `nameIndex` that a node gives them. It has all drivers at once, and counts devices of one name in the
 * order in which Vulkan has them; `together` is that order.
 */
export function numbered<T extends Named>(adapters: readonly T[], together: readonly VulkanDevice[]): T[] {
  const free: (string | undefined)[] = together.map(identityOf);
  const places = adapters.map(({ device }) => {
    const place = device === undefined ? -1 : free.indexOf(identityOf(device));
    if (place < 0) return Infinity; // the order in which they were found
    free[place] = undefined;
    return place;
  });
  const order = adapters
    .map((_, at) => at)
    .toSorted((a, b) => (places[a] === places[b] ? a - b : places[a]! - places[b]!));
  const seen = new Map<string, number>();
  const all = [...adapters];
  for (const at of order) {
    const { summary } = adapters[at]!;
    const nameIndex = seen.get(keyOf(summary)) ?? 0;
    seen.set(keyOf(summary), nameIndex + 1);
    all[at] = { ...adapters[at]!, summary: { ...summary, nameIndex } };
  }
  return all;
}

/** Free memory is another each time. */
const identityOf = (device: VulkanDevice): string => JSON.stringify({ ...device, heaps: [] });
