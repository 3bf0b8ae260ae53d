import type { Activations, BuildContext, ModuleSpec, Pass } from "../nn/index.ts";

/** A tree of module specs, and the same tree of modules. */
export type Tree = {
  readonly [name: string]: ModuleSpec<unknown> | Tree | readonly (ModuleSpec<unknown> | Tree)[] | undefined;
};
export type Built<T> = T extends ModuleSpec<infer M> ? M : T extends object ? { [K in keyof T]: Built<T[K]> } : T;

const isSpec = (node: object): node is ModuleSpec<unknown> => "build" in node && typeof node.build === "function";

export function flatten(tree: object): ModuleSpec<unknown>[] {
  if (isSpec(tree)) return [tree];
  return Object.values(tree).flatMap((child) => (child ? flatten(child) : []));
}

export async function buildTree(tree: object, context: BuildContext): Promise<unknown> {
  if (isSpec(tree)) return tree.build(context);
  // One after another: a software driver takes tens of megabytes for each kernel that it compiles.
  if (Array.isArray(tree)) {
    const list: unknown[] = [];
    for (const child of tree) list.push(await buildTree(child, context));
    return list;
  }
  const built: Record<string, unknown> = {};
  for (const [name, child] of Object.entries(tree)) built[name] = child && (await buildTree(child, context));
  return built;
}

/** Something that takes activations to activations: a module, or several wired together. */
export interface Block {
  forward(pass: Pass, x: Activations): Activations;
}

/** Modules and their wiring as one module, so that a family can put a block of its own where others have an ordinary one. */
export function block<T extends Tree>(tree: T, forward: (modules: Built<T>) => Block["forward"]): ModuleSpec<Block> {
  const specs = flatten(tree);
  return {
    weights: specs.flatMap((spec) => spec.weights),
    temporaries: specs.flatMap((spec) => spec.temporaries),
    build: async (context) => ({ forward: forward((await buildTree(tree, context)) as Built<T>) }),
  };
}
