/** Some neighbouring heads in the columns of a row. */
export interface HeadColumns {
  /** Column of the first head. */
  readonly first: number;
  readonly heads: number;
  /** Columns from one head to the next. */
  readonly headStride: number;
}

/** Where a row holds its queries, keys and values. */
export interface QkvLayout {
  readonly columns: number;
  readonly queries: HeadColumns;
  readonly keys: HeadColumns;
  readonly values: HeadColumns;
}

/** All queries, then all keys, then all values. */
export function sideBySide(heads: number, kvHeads: number, headDim: number): QkvLayout {
  const kv = (first: number): HeadColumns => ({ first: first * headDim, heads: kvHeads, headStride: headDim });
  return {
    columns: (heads + 2 * kvHeads) * headDim,
    queries: { first: 0, heads, headStride: headDim },
    keys: kv(heads),
    values: kv(heads + kvHeads),
  };
}

/** Head by head its query, its key and its value: GPT-NeoX's. */
export function headByHead(heads: number, headDim: number): QkvLayout {
  const at = (first: number): HeadColumns => ({ first, heads, headStride: 3 * headDim });
  return { columns: 3 * heads * headDim, queries: at(0), keys: at(headDim), values: at(2 * headDim) };
}
