# SPDX-License-Identifier: Apache-2.0
"""Time what hybrid models need beside scans: `python -m benchmarks.hybrid [--only routing llama]`.

Rivals take turns with ours in one process: Inductor, and for the linear cross-entropy Liger where a module `rivals`
offers it. Each line has median microseconds, how often the rival's time holds ours, and the error against float64 or
the difference to the rival. Needs a GPU, and transformers for the layer and the training step.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

import torch_tile
from benchmarks.scan import has_rivals, rival
from benchmarks.timer import measure

TILE: dict[str, Any] = {"backend": "tile"}
LLAMA_8B = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the relative root mean square of a difference."""
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def report(name: str, asked: float, calls: Mapping[str, Callable[[], Any]], errors: str, seconds: float = 1.0) -> None:
    """Time calls by turns, ours first, and print a line."""
    times = {key: timing.median * 1e6 for key, timing in measure(calls, seconds, "cuda").items()}
    ours = times["ours"]
    each = ", ".join(f"{key} {t:.1f} ({t / ours:.2f})" for key, t in times.items())
    print(f"{name}: asked {asked}; {each}; {errors}", flush=True)


def routed(logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Choose 8 experts for each token, sort the pairs by expert, and count those of each expert."""
    weights, experts = torch.topk(logits.softmax(-1, dtype=torch.float32), 8)
    order = torch.argsort(experts.flatten(), stable=True)
    return weights / weights.sum(-1, keepdim=True), experts, order, torch.bincount(experts.flatten(), minlength=256)


def routing() -> None:
    """Route 4096 tokens to 8 of 256 experts."""
    logits = torch.randn(4096, 256, device="cuda")

    def ours() -> tuple[torch.Tensor, ...]:
        weights, experts = torch.ops.tile.route(logits, None, 8)
        return weights, experts, *torch.ops.tile.group_tokens(experts, 256)

    inductor = torch.compile(routed, dynamic=False)
    wanted, found = inductor(logits), ours()
    sums = relative(found[0].sort(-1).values, wanted[0].sort(-1).values)
    same = bool((found[1].sort(-1).values == wanted[1].sort(-1).values).all())
    report(
        "routing 4096 x 256, top 8",
        2.0,
        {"ours": ours, "Inductor": lambda: inductor(logits)},
        f"weights differ by {sums:.1e}, same experts {same}",
    )


def linear_loss() -> None:
    """Compute the loss of 8192 rows of 4096 over 128256 classes, and its gradients."""
    x = torch.randn(8192, 4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = (torch.randn(128256, 4096, device="cuda") * 4096**-0.5).bfloat16().requires_grad_()
    target = torch.randint(0, 128256, (8192,), device="cuda")

    def ours() -> tuple[torch.Tensor, ...]:
        with torch.enable_grad():
            loss = torch_tile.nn.linear_cross_entropy(x, weight, target)
            return loss, *torch.autograd.grad(loss, (x, weight))

    calls: dict[str, Callable[[], Any]] = {"ours": ours}
    if has_rivals():

        def liger() -> Any:
            with torch.enable_grad():
                return rival("liger_linear_cross_entropy")(x, weight, target)

        calls["Liger"] = liger
    peaks, found = [], {}
    for name, call in calls.items():
        found[name] = call()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        peaks.append(f"{name} {(torch.cuda.max_memory_allocated() - before) / 2**30:.2f}")
    rows = slice(0, 8192, 64)
    wide = (x.detach()[rows].double() @ weight.detach().double().t()).softmax(-1)
    of_x = ((wide - F.one_hot(target[rows], 128256)) @ weight.detach().double()) / 8192
    errors = ", ".join(f"{name} {relative(results[1][rows], of_x):.1e}" for name, results in found.items())
    del found, wide
    report(
        "linear cross-entropy 8192 x 4096 x 128256 with gradients",
        1.0,
        calls,
        f"GiB above weights and inputs, 1.04 of gradients: {', '.join(peaks)}; errors {errors}",
        2.0,
    )


def delta_layer() -> None:
    """Run one gated delta layer of Qwen3-Next, 1 x 4096 tokens, forward."""
    from transformers import Qwen3NextConfig
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

    torch.manual_seed(0)
    make: Any = Qwen3NextGatedDeltaNet
    layer = make(Qwen3NextConfig(), 0)
    layer = layer.cuda().bfloat16().eval()
    x = torch.randn(1, 4096, layer.hidden_size, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        wanted = layer.double()(x.double())
        layer.bfloat16()
        calls: dict[str, Callable[[], Any]] = {}
        errors = []
        for name, options in (("ours", TILE), ("Inductor", {})):
            made: Any = torch.compile(layer.forward, dynamic=False, **options)
            errors.append(f"{name} {relative(made(x), wanted):.1e}")
            calls[name] = partial(made, x)
        report("delta layer of Qwen3-Next 1 x 4096", 3.0, calls, f"errors {', '.join(errors)}")


def llama() -> None:
    """Take a training step of four layers of Llama-8B with its real vocabulary, 1 x 8192 tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=128256, num_hidden_layers=4, use_cache=False, **LLAMA_8B)
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).bfloat16().train()
    tokens = torch.randint(0, 128256, (1, 8192), device="cuda")
    calls: dict[str, Callable[[], Any]] = {}
    peaks = []
    for name, options in (("ours", TILE), ("Inductor", {})):
        forward = torch.compile(lambda: model(input_ids=tokens, labels=tokens).loss, dynamic=False, **options)

        def step(forward: Any = forward) -> torch.Tensor:
            with torch.enable_grad():
                loss: torch.Tensor = forward()
                loss.backward()
            model.zero_grad(set_to_none=True)
            return loss.detach()

        losses = [float(step()) for _ in range(2)]
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        peaks.append(f"{name} {(torch.cuda.max_memory_allocated() - before) / 2**30:.2f} (loss {losses[0]:.4f})")
        calls[name] = step
    report(
        "Llama-8B, four layers, a training step of 1 x 8192", 1.15, calls, f"GiB above weights: {', '.join(peaks)}", 4.0
    )


CASES = {"routing": routing, "linear_loss": linear_loss, "delta_layer": delta_layer, "llama": llama}


def main() -> int:
    """Run the cases that are asked for; 1 if one failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", default=list(CASES), choices=list(CASES))
    failed = False
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    with torch.no_grad():
        for name in parser.parse_args().only:
            begin = time.perf_counter()
            try:
                CASES[name]()
            except Exception:
                failed = True
                traceback.print_exc()
            print(f"({name} took {time.perf_counter() - begin:.0f} s)", flush=True)
            torch.cuda.empty_cache()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
