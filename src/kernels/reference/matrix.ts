/** A matrix as its rows: all that the reference kernels know of layout. */
export type Matrix = readonly ArrayLike<number>[];

/** [rows, columns] of what `value` gives for each place. */
export const matrixOf = (rows: number, columns: number, value: (row: number, column: number) => number): number[][] =>
  Array.from({ length: rows }, (_, row) => Array.from({ length: columns }, (__, column) => value(row, column)));
