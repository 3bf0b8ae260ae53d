/** CRC-32C (Castagnoli, reflected), as iSCSI and ext4 use it. `crc32c("123456789")` is e3069283. */
export function crc32c(bytes: Uint8Array): number {
  let crc = 0xffffffff;
  for (let i = 0; i < bytes.length; i++) crc = TABLE[(crc ^ bytes[i]!) & 0xff]! ^ (crc >>> 8);
  return (crc ^ 0xffffffff) >>> 0;
}

/** As the metadata of a container spells it: 8 hex digits. */
export const crc32cHex = (bytes: Uint8Array): string => crc32c(bytes).toString(16).padStart(8, "0");

const TABLE = Uint32Array.from({ length: 256 }, (_, byte) => {
  let crc = byte;
  for (let bit = 0; bit < 8; bit++) crc = crc & 1 ? 0x82f63b78 ^ (crc >>> 1) : crc >>> 1;
  return crc;
});
