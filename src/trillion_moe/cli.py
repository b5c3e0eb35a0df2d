"""`trillion-moe`: one verb per job. Errors go to standard error in one message, the exit code is then 1 (2: usage)."""

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence

import jax

from trillion_moe import __version__, api
from trillion_moe.transforms.targets import places


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        return args.run(args)
    except (api.ConfigError, api.CheckpointError, api.InputError, OSError, EOFError, FloatingPointError) as error:
        print(f"trillion-moe {args.verb}: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="trillion-moe", description="Kimi K3 and its relatives in JAX.")
    parser.add_argument("--version", action="version", version=f"trillion-moe {__version__}, jax {jax.__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    inspect = verbs.add_parser("inspect", help="load a checkpoint, check all of it, print what it holds")
    inspect.add_argument("folder")
    inspect.add_argument("--json", action="store_true", help="print JSON")
    inspect.set_defaults(run=_inspect)
    generate = verbs.add_parser("generate", help="continue token ids greedily")
    generate.add_argument("folder")
    generate.add_argument("--ids", type=_ids, action="append", required=True, help="a prompt: 1,2,3; may be repeated")
    generate.add_argument("--max-new-tokens", type=int, default=128)
    generate.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="as stored by default")
    generate.set_defaults(run=_generate)
    return parser


def _ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a comma-separated list of token ids") from None


def _inspect(args: argparse.Namespace) -> int:
    """Parameters and bytes by group; loading has audited every tensor."""
    model = api.load(args.folder)
    parameters, nbytes = Counter(), Counter()
    for place in places(model, inside=True)[0]:
        name = place.names[0]
        held = {"packed": 2, "scale": 0}.get(name.rsplit(".", 1)[-1], 1)  # of 4-bit matrices: two values a byte
        group = next((part for part in name.split(".") if part in ("vision", "projector")), None) or place_group(name)
        parameters[group] += held * place.leaf.size
        nbytes[group] += place.leaf.nbytes
    cfg = model.config
    about = {
        "model_type": cfg.model_type,
        "layers": cfg.num_layers,
        "kda_layers": cfg.attention.count("kda"),
        "mla_layers": cfg.attention.count("mla"),
        "dtype": model.dtype,
        "experts": "packed MXFP4" if cfg.quantization else model.dtype,
        "parameters": {**parameters, "total": parameters.total()},
        "bytes": {**nbytes, "total": nbytes.total()},
    }
    if args.json:
        print(json.dumps(about, indent=2))
        return 0
    for key in ("model_type", "layers", "kda_layers", "mla_layers", "dtype", "experts"):
        print(f"{key:20} {about[key]}")
    print(f"{'group':20} {'parameters':>16} {'bytes':>16}")
    for group in about["parameters"]:
        print(f"{group:20} {about['parameters'][group]:16,} {about['bytes'][group]:16,}")
    return 0


def place_group(name: str) -> str:
    """What part of the model a leaf belongs to, from its logical name."""
    if not name.startswith("layers."):
        return name.split(".")[0]
    module, *rest = name.split(".")[2:]
    if module != "ffn" or not rest:
        return module
    return f"ffn.{rest[0]}" if rest[0] in ("experts", "shared", "router") else "ffn"


def _generate(args: argparse.Namespace) -> int:
    model = api.load(args.folder, dtype=args.dtype)
    start = time.perf_counter()
    completions = api.generate(model, args.ids, max_new_tokens=args.max_new_tokens)
    seconds = time.perf_counter() - start
    for completion in completions:
        print(",".join(map(str, completion.ids)))
    count = sum(len(c.ids) for c in completions)
    print(f"{count} tokens in {seconds:.2f} s, compilation included", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
