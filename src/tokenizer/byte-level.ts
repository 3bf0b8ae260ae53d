/**
 * Byte-level BPE spells each byte as one printable character: the printable ones of Latin-1 as themselves, the other 68
 * as the characters from U+0100 on, in order (GPT-2, `bytes_to_unicode`).
 */
const BYTE_OF: ReadonlyMap<string, number> = (() => {
  const printable = (byte: number) => (byte > 0x20 && byte < 0x7f) || (byte > 0xa0 && byte !== 0xad);
  const map = new Map<string, number>();
  for (let byte = 0, next = 0x100; byte < 0x100; byte++) {
    map.set(String.fromCharCode(printable(byte) ? byte : next++), byte);
  }
  return map;
})();

/** From a way to spell a token by id, a way to get its bytes; a token not spelt in bytes (an added one) is UTF-8. */
export function byteLevelBytes(spell: (id: number) => string | undefined): (id: number) => Uint8Array {
  return (id) => {
    const token = spell(id) ?? "";
    const bytes = Array.from(token, (character) => BYTE_OF.get(character));
    return bytes.includes(undefined) ? new TextEncoder().encode(token) : Uint8Array.from(bytes as number[]);
  };
}
