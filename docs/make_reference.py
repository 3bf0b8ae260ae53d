"""Writes what transformers computes of a model, for `meshnet verify --reference`.

    pip install torch transformers safetensors
    python make_reference.py MODEL OUT.safetensors [--prompts FILE] [--tokens 48] [--trust-remote-code]

MODEL is a directory or an id on the Hub. Two runs of the same bfloat16 weights, with eager attention: `fp32` computes in
float32, which takes four bytes of memory for each parameter, `bf16_eager` in bfloat16. docs/verify.md lists the tensors.
"""

import argparse
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

RUNS = {"fp32": torch.float32, "bf16_eager": torch.bfloat16}
# One for each kind of text that tokenizers and models treat differently.
PROMPTS = {
    "prose": "The old harbour lies at the end of a narrow road that runs along the river. In the morning the boats come "
    "back with what they have caught in the night, and the first buyers are already waiting on the stones.",
    "code": "def mean(values):\n    total = 0.0\n    for value in values:\n        total += value\n    return total / len(values)\n",
    "odd": "Grüße, 世界! 1234567890 👩‍👧 naïve café\n\t½ € “free”",
    "short": "Once upon",
}
SEED = 20261129


def main():
    args = parse_args()
    config = AutoConfig.from_pretrained(args.model, trust_remote_code=args.trust_remote_code)
    ids = prompt_ids(args, config.get_text_config())
    tensors = {f"{name}.input_ids": torch.tensor(row, dtype=torch.int32) for name, row in ids.items()}
    model = load(args, config)
    for run in ("bf16_eager", "fp32"):  # the wider one last: it is made of the other, in its place
        model = model.to(RUNS[run])
        for name, row in ids.items():
            tensors |= {f"{name}.{run}.{key}": value.to(RUNS[run]) for key, value in forward(model, row).items()}
    made_with = {"made_by": "make_reference.py", "torch": torch.__version__, "transformers": transformers.__version__}
    save_file(tensors, args.out, metadata=made_with | {"model": str(args.model)})
    for name, row in ids.items():
        exact, rounded = (tensors[f"{name}.{run}.logits"].float() for run in RUNS)
        noise = (rounded - exact).square().mean().sqrt().item()
        print(f"{name}: {len(row)} tokens, noise of the logits {noise:.4g}")


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--prompts", type=Path, help="a file of texts, one prompt a line")
    parser.add_argument("--tokens", type=int, default=48, help="the most of a prompt that are used")
    parser.add_argument("--trust-remote-code", action="store_true")
    return parser.parse_args()


def prompt_ids(args, config):
    """Ids of texts, or random ones where the model has no tokenizer."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(args.model, trust_remote_code=args.trust_remote_code)
    except (OSError, ValueError, KeyError) as problem:
        if args.prompts:
            raise
        print(f"random ids, for the tokenizer cannot be loaded: {str(problem).splitlines()[0]}")
        generator = torch.Generator().manual_seed(SEED)
        sizes = {"random": args.tokens, "short": 5}
        return {name: torch.randint(config.vocab_size, (size,), generator=generator).tolist() for name, size in sizes.items()}
    texts = PROMPTS
    if args.prompts:
        lines = args.prompts.read_text(encoding="utf-8").splitlines()
        texts = {f"line {number}": line for number, line in enumerate(lines, 1) if line.strip()}
    return {name: tokenizer(text)["input_ids"][: args.tokens] for name, text in texts.items()}


def load(args, config):
    """Eager attention: others leave out Gemma 2's soft cap. Experts one by one: other kernels take whole 16 bytes only."""
    auto = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
    return auto.from_pretrained(
        args.model, dtype=torch.bfloat16, attn_implementation="eager", experts_implementation="eager",
        trust_remote_code=args.trust_remote_code,
    ).eval()


def parts(model):
    """The layers and the final norm, under the names that families give them."""
    base = model.base_model
    base = getattr(base, "language_model", base)
    layers = base.h if hasattr(base, "h") else base.layers
    norms = (getattr(base, name, None) for name in ("norm", "ln_f", "final_layer_norm"))
    return layers, next(norm for norm in norms if norm is not None)


@torch.no_grad()
def forward(model, ids):
    """hidden.i enters layer i; what leaves the last layer is normalised: transformers' own `hidden_states` are not so clear."""
    (layers, norm), seen = parts(model), {}
    take = lambda out: (out[0] if isinstance(out, tuple) else out)[0].clone()
    hooks = [
        layer.register_forward_hook(lambda _, __, out, i=i: seen.update({f"hidden.{i}": take(out)}))
        for i, layer in enumerate(layers[:-1], 1)
    ]
    hooks.append(norm.register_forward_hook(lambda _, __, out: seen.update({"norm": take(out)})))
    seen["logits"] = model(torch.tensor([ids]), use_cache=False).logits[0].clone()
    for hook in hooks:
        hook.remove()
    return seen


if __name__ == "__main__":
    main()
