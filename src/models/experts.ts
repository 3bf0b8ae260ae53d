import { addGated, experts, linear, type ModuleSpec, residual, route, type RouteSpec } from "../nn/index.ts";
import type { ConfigReader } from "./config.ts";
import { type DecoderConfig, gatedMlp } from "./decoder.ts";
import type { StageOptions } from "./family.ts";
import { type Block, block } from "./tree.ts";

/** The layers of a family whose MLP is a mixture of experts. */
export interface MixtureConfig extends DecoderConfig {
  readonly mixture: Mixture;
}

export interface Mixture {
  readonly experts: number;
  /** Experts that a token takes. */
  readonly chosen: number;
  readonly innerSize: number;
  readonly route: Omit<RouteSpec, "experts" | "chosen" | "bias">;
  /** Layer by layer whether it has experts; the others have an ordinary MLP. */
  readonly isSparse: readonly boolean[];
  /** An expert that every token has: its size, and whether the token opens a gate for it. */
  readonly shared?: { readonly innerSize: number; readonly isGated: boolean; readonly name: string };
}

/** Names of an expert's matrices behind its own. */
export interface ExpertNames {
  /** The module that holds router and experts. */
  readonly module: string;
  readonly gate: string;
  readonly up: string;
  readonly down: string;
  /** What is added to the scores for the choice. */
  readonly bias?: string;
}

export const EXPERT_NAMES: ExpertNames = { module: "mlp", gate: "gate_proj", up: "up_proj", down: "down_proj" };

/** How many experts there are, and how many a token takes. @throws UserError `bad_model` where it takes more than there are. */
export function readCounts(json: ConfigReader, keys: { experts: string; chosen: string }, defaults: [number, number?]) {
  const counts = {
    experts: json.count(keys.experts, defaults[0], MOST_EXPERTS),
    chosen: json.count(keys.chosen, defaults[1]),
  };
  if (counts.chosen <= counts.experts) return counts;
  throw json.refuse(
    `${keys.chosen} ${counts.chosen} is more than ${keys.experts} ${counts.experts}`,
    "use the config.json that belongs to the model",
  );
}

/** The kernel that chooses keeps the scores of all of them in workgroup memory. */
const MOST_EXPERTS = 1024;

/** The MLP of a layer: a mixture of experts, or an ordinary one. */
export function mixtureMlp(
  config: MixtureConfig,
  layer: number,
  options: StageOptions,
  names: ExpertNames = EXPERT_NAMES,
): ModuleSpec<Block> {
  const { mixture, hiddenSize } = config;
  const name = `layers.${layer}.${names.module}`;
  if (!mixture.isSparse[layer]) return gatedMlp(config, `layers.${layer}.mlp`, options);
  const { shared } = mixture;
  const counts = { experts: mixture.experts, chosen: mixture.chosen };
  return block(
    {
      // Its choice is worth more than its bytes.
      score: linear({
        weight: [`${name}.gate.weight`],
        in: hiddenSize,
        out: mixture.experts,
        output: "expert_logits",
        keepsBf16: "unless stored",
      }),
      choose: route({ ...mixture.route, ...counts, bias: names.bias && `${name}.${names.bias}` }),
      experts: experts({
        name: `${name}.experts`,
        weights: (expert) => {
          const of = (part: string) => [`${name}.experts.${expert}.${part}.weight`];
          return { gate: of(names.gate), up: of(names.up), down: of(names.down) };
        },
        ...counts,
        hidden: hiddenSize,
        inner: mixture.innerSize,
        activation: config.activation,
        output: "mixed",
      }),
      shared: shared && sharedExpert(config, name, options, shared),
    },
    ({ score, choose, experts, shared }) =>
      (pass, x) => {
        choose.forward(pass, score.forward(pass, x));
        const mixed = experts.forward(pass, x);
        if (!shared) return mixed;
        const { mlp, gate, addAll, addOpened } = shared;
        const always = mlp.forward(pass, x);
        return gate && addOpened
          ? addOpened.forward(pass, mixed, always, gate.forward(pass, x))
          : addAll!.forward(pass, mixed, always);
      },
  );
}

function sharedExpert(
  config: MixtureConfig,
  name: string,
  options: StageOptions,
  { innerSize, isGated, name: expert }: NonNullable<Mixture["shared"]>,
) {
  const columns = config.hiddenSize;
  return {
    mlp: gatedMlp(config, `${name}.${expert}`, options, innerSize, "shared_"),
    gate: isGated
      ? linear({
          weight: [`${name}.${expert}_gate.weight`],
          in: columns,
          out: 1,
          output: "shared_gate",
          int8Activations: options.int8Activations,
        })
      : undefined,
    addAll: isGated ? undefined : residual({ columns, round: false }),
    addOpened: isGated ? addGated({ columns }) : undefined,
  };
}
