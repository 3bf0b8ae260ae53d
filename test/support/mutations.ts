import { fileWithHeader, seededRandom } from "./safetensors.ts";

/** One entry of a header as text, so that it can be wrong in any way. */
interface Entry {
  name: string;
  /** Key and value, both as JSON text. */
  fields: [key: string, value: string][];
  bytes: number;
}

const NAMES = [
  "wte.weight",
  "h.0.ln_1.weight",
  "h.0.attn.c_attn.weight",
  "h.10.mlp.c_fc.bias",
  "ln_f.bias",
  "scale",
  "é😀",
];
const TYPES = "F32:32 F16:16 BF16:16 F64:64 I64:64 U8:8 BOOL:8 F8_E4M3:8 F4:4 F6_E2M3:6 C64:64 I16:16"
  .split(" ")
  .map((type) => type.split(":") as [dtype: string, bits: string]);
const NUMBERS = [
  "0 1 2 7 8 255 65536 2147483647 2147483648 4294967295 4294967296 9007199254740991 9007199254740992",
  "18446744073709551615 18446744073709551616 1e400 1e308 -1 -0 4.0 4e0 0.5 01 +1 .5 0x4 NaN 1_000",
  '"4" null true [] {}',
].flatMap((line) => line.split(" "));
const ODD_NAMES = [
  ..."__metadata__ __proto__ constructor \\u0000 \\ud800 \\ud83d\\ude00 .. a/b \\n \\x é wte\\u002eweight wte.weight".split(
    " ",
  ),
  "",
  "\n",
  "\u007f",
  "x".repeat(5000),
];
const JUNK = [
  ...`null [] {} 0 "" [[[[]]]] {"a":{"b":[1,2.5e-3,"c"]}} tru 'x' // [1,] {,} [,1] "\\u12" \ufeff \0`.split(" "),
  "[".repeat(200),
  `[${"0,".repeat(3000)}0]`,
];
const BYTES = [0, 1, 8, 0x22, 0x2c, 0x2d, 0x2e, 0x30, 0x39, 0x5b, 0x5c, 0x5d, 0x65, 0x7b, 0x7d, 0x7f, 0x80, 0xc0, 0xff];

/** Damaged files, the same for the same seed: broken where a SafeTensors file can be, and where any file can be. */
export class Mutator {
  readonly #random: () => number;

  constructor(seed: number) {
    this.#random = seededRandom(seed);
  }

  below = (bound: number): number => Math.floor(this.#random() * bound);
  pick = <T>(list: readonly T[]): T => list[this.below(list.length)]!;
  chance = (probability: number): boolean => this.#random() < probability;

  /** A file, valid until up to three things in its header are changed. The data fits what the entries said before. */
  structured(): Uint8Array {
    const entries = this.#entries();
    let data = entries.reduce((sum, { bytes }) => sum + bytes, 0);
    const extra: string[] = this.chance(0.5) ? ['"__metadata__":{"format":"pt"}'] : [];
    for (let edits = this.below(4); edits > 0; edits--) this.#edit(entries, extra);
    if (this.chance(0.1)) data = Math.max(0, data + this.below(17) - 8);
    const members = [...extra, ...entries.map(({ name, fields }) => `"${name}":${this.#object(fields)}`)];
    if (this.chance(0.2)) members.reverse();
    const space = this.chance(0.2) ? this.pick([" ", "\n", "\t", "\r", "\0", "\u00a0", "   "]) : "";
    const header = `${space}{${members.join(`,${space}`)}}${space}`;
    return fileWithHeader(
      header,
      Uint8Array.from({ length: data }, (_, i) => i),
    );
  }

  /** Another file of the same bytes but for flipped bits, cuts, growth, moved and repeated pieces. */
  raw(file: Uint8Array): Uint8Array {
    let bytes: Uint8Array = file.slice();
    for (let edits = 1 + this.below(3); edits > 0; edits--) bytes = this.#damage(bytes);
    return bytes;
  }

  #entries(): Entry[] {
    let at = 0;
    return NAMES.slice(0, this.below(NAMES.length + 1)).map((name) => {
      const [dtype, bits] = this.pick(TYPES);
      const shape = Array.from({ length: this.below(4) }, () => this.pick([0, 1, 2, 3, 4, 8]));
      if (Number(bits) < 8) shape.push(8);
      const bytes = shape.reduce((product, size) => product * size, Number(bits)) / 8;
      const offsets = [at, (at += bytes)];
      const fields: Entry["fields"] = [
        ['"dtype"', `"${dtype}"`],
        ['"shape"', JSON.stringify(shape)],
        ['"data_offsets"', JSON.stringify(offsets)],
      ];
      return { name, fields, bytes };
    });
  }

  #edit(entries: Entry[], extra: string[]): void {
    const entry = entries[this.below(entries.length)];
    if (!entry) return void extra.push(this.pick(['"__metadata__":null', '"__metadata__":{"a":1}', '"x":7', ""]));
    const field = this.below(entry.fields.length);
    switch (this.below(12)) {
      case 0:
        return void (entry.name = this.pick(ODD_NAMES));
      case 1:
        return void entries.push({ ...entry, name: this.chance(0.5) ? entry.name : `${entry.name}2` });
      case 2:
        return void entry.fields.splice(field, 1);
      case 3:
        return void entry.fields.push([...entry.fields[field]!]);
      case 4:
        return void entry.fields.push([this.pick(['"z"', '"dtype"', '""', '"__proto__"', "z"]), this.pick(JUNK)]);
      case 5:
        return void this.#setField(entry, field, () => this.pick(JUNK));
      case 6:
      case 7:
        return this.#setField(entry, field, (text) => text.replace(/\d+/, () => this.pick(NUMBERS)));
      case 8:
        return this.#setField(entry, field, (text) =>
          text.replaceAll(/\d+/g, (digits) => (this.chance(0.5) ? `${Number(digits) + this.below(5) - 2}` : digits)),
        );
      case 9:
        return this.#setField(entry, field, (text) => text.replace("]", this.pick([",1]", ",0]", ",]", "", "]]"])));
      case 10:
        return this.#setField(entry, field, (text) =>
          text.replace(/\w+/, () => this.pick(["F32", "F64", "f32", "F42"])),
        );
      default:
        return void extra.push(
          this.pick(['"__metadata__":{}', '"__metadata__":{"a":"1","a":"2"}', '"__metadata__":[]', "1"]),
        );
    }
  }

  #setField(entry: Entry, index: number, change: (text: string) => string): void {
    const field = entry.fields[index];
    if (field) field[1] = change(field[1]);
  }

  /** Now and then as the list of its values, which is allowed too. */
  #object(fields: Entry["fields"]): string {
    if (this.chance(0.05)) return `[${fields.map(([, value]) => value).join(",")}]`;
    return `{${fields.map((pair) => pair.join(":")).join(",")}}`;
  }

  #damage(bytes: Uint8Array): Uint8Array {
    const at = this.below(bytes.length + 1);
    const piece = bytes.subarray(at, at + this.below(20));
    switch (this.below(8)) {
      case 0:
      case 1: {
        const flipped = bytes.slice();
        if (at < bytes.length) flipped[at]! ^= 1 << this.below(8);
        return flipped;
      }
      case 2: {
        const replaced = bytes.slice();
        if (at < bytes.length) replaced[at] = this.pick(BYTES);
        return replaced;
      }
      case 3:
        return bytes.slice(0, at);
      case 4:
        return join(bytes, new Uint8Array(this.below(30)));
      case 5: // a piece moved or repeated somewhere else
        return this.#corrected(
          join(bytes.subarray(0, at), piece, bytes.subarray(this.chance(0.5) ? at : at + piece.length)),
        );
      case 6: {
        const insert = Uint8Array.from({ length: this.below(6) }, () => this.pick(BYTES));
        return this.#corrected(join(bytes.subarray(0, at), insert, bytes.subarray(at)), insert.length);
      }
      default: {
        const lengthened = bytes.slice();
        if (bytes.length === 0) return lengthened;
        if (this.chance(0.5)) lengthened[Math.min(this.below(8), bytes.length - 1)] = this.below(256);
        else lengthened[0]! += this.below(17) - 8;
        return lengthened;
      }
    }
  }

  /** Half of the time the header's length is put right, so that the damage reaches the parser. */
  #corrected(bytes: Uint8Array, by = 0): Uint8Array {
    if (bytes.length < 8 || this.chance(0.5)) return bytes;
    const view = new DataView(bytes.buffer, bytes.byteOffset);
    view.setUint32(0, (view.getUint32(0, true) + by) >>> 0, true);
    return bytes;
  }
}

const join = (...parts: Uint8Array[]): Uint8Array => new Uint8Array(Buffer.concat(parts));
