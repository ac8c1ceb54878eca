# SPDX-License-Identifier: Apache-2.0
"""How long the first call of a compiled model takes in a new process whose caches are warm, beside Inductor.

`python -m benchmarks.warm_start --repeat 5`: a Llama of four layers, in processes that take turns. Each has the imports
and one eager call behind it; what is timed is torch.compile, the first call, and the imports that these cause.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time

from benchmarks.fresh import in_fresh_process

BACKENDS = ("tile", "inductor")


def first_call(backend: str) -> None:
    """Print wall and processor seconds of the first call, and whether the graph came from a cache."""
    import torch
    from torch._dynamo.utils import counters
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "vocab_size": 96}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128)
    model, tokens = LlamaForCausalLM(config).eval(), torch.arange(16)[None]
    with torch.no_grad():
        model(tokens, use_cache=False)
        wall, processor = time.perf_counter(), time.process_time()
        if backend == "tile":
            import torch_tile

            compiled = torch.compile(model, backend=torch_tile.tile, options={"select": "tile"})
        else:
            compiled = torch.compile(model)
        compiled(tokens, use_cache=False)
        wall, processor = time.perf_counter() - wall, time.process_time() - processor
    print(json.dumps({"wall": wall, "cpu": processor, "hit": counters["aot_autograd"]["autograd_cache_hit"]}))


def run(backend: str, folder: str) -> dict[str, float]:
    """`first_call` in a process of its own, with the caches of `folder`."""
    return dict(in_fresh_process("benchmarks.warm_start", "--child", backend, caches=folder))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=5, help="warm processes of each backend")
    parser.add_argument("--child", choices=BACKENDS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        first_call(options.child)
        return
    with tempfile.TemporaryDirectory() as folder:
        cold = {backend: run(backend, folder) for backend in BACKENDS}
        warm: dict[str, list[dict[str, float]]] = {backend: [] for backend in BACKENDS}
        for _ in range(options.repeat):
            for backend in BACKENDS:
                warm[backend].append(run(backend, folder))
    middle = {b: {k: statistics.median(r[k] for r in runs) for k in runs[0]} for b, runs in warm.items()}
    for backend in BACKENDS:
        hit = "hit" if middle[backend]["hit"] else "MISS"
        print(
            f"{backend:9} cold {cold[backend]['wall']:.2f} s wall, {cold[backend]['cpu']:.2f} s cpu; "
            f"warm ({hit}) {middle[backend]['wall']:.2f} s wall, {middle[backend]['cpu']:.2f} s cpu"
        )
    for what in ("wall", "cpu"):
        print(f"warm {what}, tile / inductor: {middle['tile'][what] / middle['inductor'][what]:.2f}")


if __name__ == "__main__":
    main()
